//! The check of every invariant of the arena, for [`Pool::check`](crate::Pool::check).
//!
//! It walks the page map of each extent from run to run, and each run's descriptors in the order of
//! their addresses, and compares the sums with what the arena has counted.

use std::collections::HashSet;

use super::*;

/// What a walk adds up.
#[derive(Debug, Default, PartialEq, Eq)]
struct Sums {
    total: usize,
    cut: usize,
    out: usize,
    unheld: usize,
    runs: usize,
    /// Segments of the runs, by class.
    carved: Vec<u32>,
    /// Segments that are out, by window.
    windows: BTreeMap<WindowId, u32>,
}

fn must(holds: bool, says: impl FnOnce() -> String) -> Result<(), String> {
    if holds { Ok(()) } else { Err(says()) }
}

impl Arena {
    /// Checks every invariant. `outside` are the free descriptors in thread and transfer caches, by
    /// address. `visit` sees every descriptor, its bytes, and whether it is free.
    ///
    /// # Errors
    /// The first violation, in words.
    pub(crate) fn check(
        &self,
        outside: &HashSet<usize>,
        mut visit: impl FnMut(&Descriptor, usize, bool),
    ) -> Result<(), String> {
        let mut sums = Sums { carved: vec![0; CLASSES], ..Sums::default() };
        sums.windows = self.windows.iter().map(|(id, _)| (id, 0)).collect();
        self.check_ranges()?;
        let (mut cached, mut listed) = (0, 0);
        for (i, e) in &self.extents {
            let (mut at, mut was_free) = (0u32, false);
            while at < e.pages {
                let entry = e.map[at as usize];
                let range = self.range_of(i as u32, at);
                if entry & FREE != 0 {
                    let pages = free_len(entry);
                    self.check_free(i as u32, at, entry, range.map(|range| range.1))?;
                    let is_free = range.is_none();
                    must(!(was_free && is_free), || format!("extent {i}: two free runs meet at page {at}"))?;
                    sums.unheld += if is_free { pages as usize * PAGE } else { 0 };
                    listed += usize::from(is_free);
                    (at, was_free) = (at + pages, is_free);
                    continue;
                }
                let run = self
                    .runs
                    .get(entry as usize)
                    .ok_or(format!("extent {i}: no run {entry} at page {at}"))?;
                let end = at + run.pages;
                let there = (run.extent, run.first) == (i as u32, at) && e.map[end as usize - 1] == entry;
                must(there, || format!("run {entry} is not where the page map says"))?;
                let (window, last) = (range.map(|range| range.0), self.range_of(i as u32, end - 1));
                must(run.window == window && last == range, || {
                    format!("run {entry} is in {:?}, and its pages are in {range:?} and {last:?}", run.window)
                })?;
                cached += self.check_run(entry, run, outside, &mut visit)?;
                self.add_run(entry, run, &mut sums)?;
                (at, was_free) = (end, false);
            }
            sums.total += e.pages as usize * PAGE;
        }
        let counted = Sums {
            total: self.total,
            cut: self.cut,
            out: self.out,
            unheld: self.unheld,
            runs: self.runs.len(),
            carved: self.carved.clone(),
            windows: self.windows.iter().map(|(id, window)| (id, window.out)).collect(),
        };
        must(sums == counted, || format!("the sums are {sums:?}, counted as {counted:?}"))?;
        must(self.free.len() == listed, || "the set of free runs has others than the page maps".into())?;
        must(cached == outside.len(), || {
            format!("{} segments are cached, and {cached} of them belong to the arena", outside.len())
        })
    }

    /// The window and the range of it that a page lies in.
    fn range_of(&self, extent: u32, page: u32) -> Option<(WindowId, PageRange)> {
        let mut ranges =
            self.windows.iter().flat_map(|(id, window)| window.ranges.iter().map(move |range| (id, *range)));
        ranges.find(|(_, range)| range.meets(extent, page, page + 1))
    }

    /// No two ranges overlap, and each lies in its extent.
    fn check_ranges(&self) -> Result<(), String> {
        let mut ranges: Vec<_> = self.windows.iter().flat_map(|(_, window)| window.ranges.clone()).collect();
        ranges.sort_unstable_by_key(|range| (range.extent, range.first));
        let apart = |pair: &[PageRange]| pair[0].extent < pair[1].extent || pair[0].end <= pair[1].first;
        must(ranges.windows(2).all(apart), || format!("windows overlap: {ranges:?}"))?;
        let pages = |range: &PageRange| self.extents.get(range.extent as usize).map_or(0, |e| e.pages);
        let inside = |range: &PageRange| range.first < range.end && range.end <= pages(range);
        must(ranges.iter().all(inside), || format!("a window leaves its extent: {ranges:?}"))
    }

    /// A free run is valid at both ends, and is in the set of free runs or in a window's range.
    fn check_free(&self, extent: u32, at: u32, entry: u32, range: Option<PageRange>) -> Result<(), String> {
        let (e, pages) = (&self.extents[extent as usize], free_len(entry));
        let valid = pages > 0 && at + pages <= e.pages && e.map[(at + pages - 1) as usize] == entry;
        must(valid, || format!("extent {extent}: the free run at page {at} has no valid last page"))?;
        let (listed, held) = (self.free.contains(&(pages, extent, at)), entry & HELD != 0);
        must(listed != held && held == range.is_some(), || {
            format!(
                "extent {extent}: the free run at page {at} is in {range:?}; withheld: {held}; in the set of free \
                 runs: {listed}"
            )
        })?;
        must(range.is_none_or(|range| at + pages <= range.end), || {
            format!("extent {extent}: the free run at page {at} leaves its window")
        })
    }

    /// Checks a run's segments. Returns how many of them are cached.
    fn check_run(
        &self,
        number: u32,
        run: &Run,
        outside: &HashSet<usize>,
        visit: &mut dyn FnMut(&Descriptor, usize, bool),
    ) -> Result<usize, String> {
        let start = self.extents[run.extent as usize].base.as_ptr().addr() + run.first as usize * PAGE;
        let end = start + run.pages as usize * PAGE;
        let listed: HashSet<usize> = run.list.iter().map(|s| std::ptr::from_ref(s).addr()).collect();
        must(listed.len() == run.list.len() as usize, || {
            format!("run {number}: its list counts {} segments but holds {}", run.list.len(), listed.len())
        })?;
        let (mut below, mut seen, mut cached) = (start, 0, 0);
        for n in 0..run.count {
            // SAFETY: the run's own descriptor.
            let descriptor = unsafe { self.descriptor(run, n).as_ref() };
            let base = descriptor.base().as_ptr().addr();
            let bytes = Self::segment_bytes(run);
            let here = std::ptr::from_ref(descriptor).addr();
            let said = descriptor.run();
            must(said == number, || {
                format!("a descriptor of run {number} says that it belongs to run {said}")
            })?;
            must(base % SEGMENT_ALIGN == 0 && base >= below && base + bytes <= end, || {
                format!("run {number}: segment {n} overlaps, leaves its run, or is misaligned")
            })?;
            below = base + bytes;
            let (in_list, in_cache) = (listed.contains(&here), outside.contains(&here));
            seen += usize::from(in_list);
            cached += usize::from(in_cache);
            let (places, state) = (usize::from(in_list) + usize::from(in_cache), descriptor.word().state());
            // A segment is free exactly if it is in one list.
            must(places == 0 || places == 1 && state == state::HOST, || {
                let state = state::name(state);
                format!("run {number}: segment {n} is {state} and is in {places} lists")
            })?;
            must(!in_cache || run.window.is_none(), || {
                format!("run {number}: segment {n} is in a window, and is cached")
            })?;
            visit(descriptor, bytes, places == 1);
        }
        must(seen == listed.len(), || {
            format!("run {number}: its list holds descriptors that are not its own")
        })?;
        Ok(cached)
    }

    /// Adds a run to the sums, and checks that it is in the sets that it belongs to.
    fn add_run(&self, number: u32, run: &Run, sums: &mut Sums) -> Result<(), String> {
        sums.runs += 1;
        let (out, bytes) = Self::out(run);
        sums.cut += Self::cut(run);
        sums.out += bytes;
        match run.window {
            Some(id) => {
                *sums.windows.entry(id).or_default() += out;
                let known = run.class.is_none_or(|class| self.windows[id].classes & set_of(class) != 0);
                must(known, || {
                    format!("run {number} has segments out in a window, which does not know its class")
                })?;
            }
            None => sums.unheld += Self::listed(run),
        }
        let Some(class) = run.class else { return Ok(()) };
        let known = self.partial[class.index()].contains(&(run.extent, run.first, number));
        let takes = !run.list.is_empty() && run.window.is_none();
        must(known == takes, || {
            format!("run {number} has {} free segments; in the set of its class: {known}", run.list.len())
        })?;
        must(out > 0, || format!("run {number} is not in use: {run:?}"))?;
        sums.carved[class.index()] += run.count;
        Ok(())
    }
}
