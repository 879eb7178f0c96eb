//! The check of every invariant of the arena, for [`Pool::check`](crate::Pool::check) and the tests.
//!
//! It walks the page map of each extent from run to run, and each run's descriptors in the order of their addresses. It
//! adds up what it finds and compares that with what the arena has counted.

use super::*;

impl Arena {
    /// Checks every invariant. `outside` are the free descriptors in thread caches and transfer caches, by address.
    /// `visit` sees every descriptor, the bytes of its segment, and whether the segment is free.
    ///
    /// # Errors
    /// The first violation, in words.
    pub(crate) fn check(
        &self,
        outside: &std::collections::HashSet<usize>,
        mut visit: impl FnMut(&Descriptor, usize, bool),
    ) -> Result<(), String> {
        let (mut total, mut cut, mut free_slots, mut free_pages, mut idle, mut runs) = (0, 0, 0, 0, 0, 0);
        let (mut held_slots, mut held_pages, mut found_outside) = (0, 0, 0);
        let mut watched = vec![0; CLASSES];
        let mut in_windows: std::collections::HashMap<usize, u32> =
            self.windows.iter().map(|(id, _)| (id, 0)).collect();
        for (i, e) in &self.extents {
            let (mut at, mut was_free, mut runs_here) = (0u32, None, 0);
            let mut out = vec![0; e.out.len()];
            // Windows by block, and with the quarantined segments.
            let mut blocked = vec![(0, 0); e.out.len()];
            for (_, window) in self.windows.iter().filter(|(_, window)| window.extent as usize == i) {
                let blocks = window.first / windows::BLOCK..window.end.div_ceil(windows::BLOCK);
                for block in blocks {
                    let (fewest, most) = &mut blocked[block as usize];
                    (*fewest, *most) = (*fewest + 1, *most + 1);
                }
            }
            while at < e.pages {
                let entry = e.map[at as usize];
                if entry & FREE != 0 {
                    let pages = free_len(entry);
                    let window = self.window_at(i as u32, at);
                    if was_free == Some(window) {
                        return Err(format!("extent {i}: two free runs meet at page {at}"));
                    }
                    if pages == 0 || at + pages > e.pages || e.map[(at + pages - 1) as usize] != entry {
                        return Err(format!("extent {i}: the free run at page {at} has no valid last page"));
                    }
                    let listed = self.free.contains(&(pages, i as u32, at));
                    let held = entry & HELD != 0;
                    if listed == held || held != window.is_some() {
                        return Err(format!(
                            "extent {i}: the free run at page {at} is in {window:?}; withheld: {held}; in the set of \
                             free runs: {listed}"
                        ));
                    }
                    if window.is_some_and(|id| self.windows[id.0].end < at + pages) {
                        return Err(format!("extent {i}: the free run at page {at} leaves its window"));
                    }
                    free_pages += pages as usize;
                    held_pages += if held { pages as usize } else { 0 };
                    (at, was_free) = (at + pages, Some(window));
                    continue;
                }
                let run = self
                    .runs
                    .get(entry as usize)
                    .ok_or(format!("extent {i}: no run {entry} at page {at}"))?;
                if (run.extent, run.first) != (i as u32, at) || e.map[(at + run.pages - 1) as usize] != entry
                {
                    return Err(format!("run {entry} is not where the page map says"));
                }
                runs += 1;
                runs_here += 1;
                if e.runs.get(&at) != Some(&entry) {
                    return Err(format!("run {entry} is not in the list of its extent"));
                }
                let start = e.base.as_ptr().addr() + at as usize * PAGE;
                let end = start + run.pages as usize * PAGE;
                let mut below = start;
                let mut covered = 0;
                let lists = run.list.iter().chain(run.held.iter());
                let listed: std::collections::HashSet<usize> =
                    lists.map(|s| std::ptr::from_ref(s).addr()).collect();
                let count = run.list.len() + run.held.len();
                if listed.len() != count as usize {
                    return Err(format!(
                        "run {entry}: its lists count {count} segments but hold {}",
                        listed.len()
                    ));
                }
                let from = if run.window.is_some() { run.keep } else { u32::MAX };
                let number = |s: &Descriptor| Self::number_of(run, s) as u32;
                if run.list.iter().any(|s| number(s) >= from) || run.held.iter().any(|s| number(s) < from) {
                    return Err(format!("run {entry}: a segment is in the wrong list for its window"));
                }
                let mut seen = 0;
                for n in 0..run.count {
                    // SAFETY: the run's own descriptor.
                    let descriptor = unsafe { self.descriptor(run, n).as_ref() };
                    let base = descriptor.base().as_ptr().addr();
                    let bytes = descriptor.class().map_or(run.alone, Class::stride);
                    let here = std::ptr::from_ref(descriptor).addr();
                    if descriptor.run() != entry {
                        return Err(format!(
                            "a descriptor of run {entry} says that it belongs to run {}",
                            descriptor.run()
                        ));
                    }
                    if descriptor.class().is_none() && run.alone == 0 {
                        continue; // A single segment that is back while its tail is out.
                    }
                    if base % SEGMENT_ALIGN != 0 || base < below || base + bytes > end {
                        return Err(format!(
                            "run {entry}: segment {n} overlaps, leaves its run, or is misaligned"
                        ));
                    }
                    below = base + bytes;
                    covered += bytes;
                    let places = usize::from(listed.contains(&here)) + usize::from(outside.contains(&here));
                    seen += usize::from(listed.contains(&here));
                    found_outside += usize::from(outside.contains(&here));
                    let state = descriptor.word().state();
                    // A segment is free exactly if it is in one list.
                    if places > 1 || places == 1 && state != state::HOST {
                        let state = state::name(state);
                        return Err(format!("run {entry}: segment {n} is {state} and is in {places} lists"));
                    }
                    if !listed.contains(&here) {
                        let at = base - e.base.as_ptr().addr();
                        if state == state::QUARANTINED {
                            let blocks =
                                at / windows::BLOCK_BYTES..(at + bytes).div_ceil(windows::BLOCK_BYTES);
                            blocks.for_each(|block| blocked[block].1 += 1);
                        }
                        for (block, sum) in out.iter_mut().enumerate() {
                            let (from, to) =
                                (block * windows::BLOCK_BYTES, (block + 1) * windows::BLOCK_BYTES);
                            *sum += (at + bytes).min(to).saturating_sub(at.max(from));
                        }
                        if let (Some(class), true) = (descriptor.class(), n >= from) {
                            watched[class.index()] += 1;
                        }
                        if let (Some(id), true) = (run.window, n >= from) {
                            if outside.contains(&here) {
                                return Err(format!(
                                    "run {entry}: segment {n} is in a window, and is cached"
                                ));
                            }
                            *in_windows.entry(id.0).or_default() += 1;
                        }
                    }
                    visit(descriptor, bytes, places == 1);
                }
                if seen != listed.len() {
                    return Err(format!("run {entry}: its list holds descriptors that are not its own"));
                }
                if covered + run.cut != end - start {
                    return Err(format!(
                        "run {entry}: {covered} bytes covered + {} cut are not {}",
                        run.cut,
                        end - start
                    ));
                }
                if let Some(class) = run.class {
                    let known = self.partial[class.index()].contains(&(run.extent, run.first, entry));
                    if known == run.list.is_empty() {
                        return Err(format!(
                            "run {entry} has {} free segments; in the set of its class: {known}",
                            run.list.len()
                        ));
                    }
                    free_slots += count as usize * class.stride();
                    held_slots += run.held.len() as usize * class.stride();
                }
                let is_idle = run.class.is_some() && !Self::is_single(run) && Self::is_idle(run);
                if is_idle != self.idle.contains(&entry) || run.frayed != self.frayed.contains(&entry) {
                    return Err(format!("run {entry} is in a wrong set: idle {is_idle}, {run:?}"));
                }
                idle += usize::from(is_idle);
                cut += run.cut;
                (at, was_free) = (at + run.pages, None);
            }
            if runs_here != e.runs.len() || out != e.out {
                return Err(format!(
                    "extent {i} has {runs_here} runs, counted as {}, and bytes out by block {out:?}, counted as {:?}",
                    e.runs.len(),
                    e.out
                ));
            }
            // A segment gets the state before it is counted, which another thread may be about to do.
            if e.blocked
                .iter()
                .zip(&blocked)
                .any(|(counted, (fewest, most))| counted < fewest || counted > most)
            {
                return Err(format!(
                    "extent {i} has {blocked:?} windows, and with quarantined segments, by block, counted as {:?}",
                    e.blocked
                ));
            }
            total += e.pages as usize * PAGE;
        }
        let sums = (total, cut, free_slots, free_pages, idle, runs);
        let kept =
            (self.total, self.cut, self.free_slot_bytes, self.free_pages, self.idle.len(), self.runs.len());
        if sums != kept {
            return Err(format!(
                "(total, cut, bytes of free segments, free pages, idle, runs) are {sums:?}, counted as {kept:?}"
            ));
        }
        if (held_slots, held_pages) != (self.held_slot_bytes, self.held_pages) {
            return Err(format!(
                "windows hold {held_slots} bytes of free segments and {held_pages} free pages, counted as {} and {}",
                self.held_slot_bytes, self.held_pages
            ));
        }
        for (id, window) in &self.windows {
            let found = in_windows[&id];
            if found != window.out {
                return Err(format!("window {id} has {found} segments out, counted as {}", window.out));
            }
        }
        if watched != self.watched {
            return Err("the segments that are given out in windows are counted wrong".into());
        }
        if self.free.iter().map(|f| f.0 as usize).sum::<usize>() != free_pages - held_pages {
            return Err("the set of free runs has others than the page maps".into());
        }
        if found_outside != outside.len() {
            return Err(format!(
                "{} segments are cached, and {found_outside} of them belong to the arena",
                outside.len()
            ));
        }
        Ok(())
    }
}
