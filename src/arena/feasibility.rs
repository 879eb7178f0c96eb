//! Feasibility: whether a request could be served if segments came back, which they may or may not do.
//!
//! The central pool decides by it whether a request may wait, and whether it may reclaim what other threads have
//! cached. So `false` is certain here, and `true` is not. A wait that can never succeed ends with an error, and a
//! reclaim that cannot help is not made, so that it costs other threads nothing. A wait or a reclaim that may succeed
//! is tried.

use super::*;

impl Arena {
    /// Whether `count` segments of a placement could be served if every segment that is not quarantined came back.
    /// `false` is certain. `true` is not certain for a `count` above one, since aligned segments and other classes may
    /// be in the way. Only the runs that have a quarantined segment are looked at one by one.
    pub(crate) fn could_serve(&self, placement: Placement, count: usize) -> bool {
        let (need, align) = placement.fresh_pages();
        let fitting = |page: usize, first: usize, end: usize| match placement {
            Placement::Class(class) => end.saturating_sub(first) * PAGE / class.stride(),
            Placement::Pages { .. } => {
                let start = (page + first).next_multiple_of(align) - page;
                end.checked_sub(start + need).map_or(0, |rest| 1 + rest / need.next_multiple_of(align))
            }
        };
        let mut found = 0;
        for (_, e) in &self.extents {
            let page = e.base.as_ptr().addr() / PAGE;
            let mut free_from = 0;
            let mut stuck: Vec<&Run> = e.stuck.iter().map(|number| &self.runs[*number as usize]).collect();
            stuck.sort_unstable_by_key(|run| run.first);
            for run in stuck {
                let descriptors: Vec<_> = (0..run.count).map(|i| self.descriptor(run, i)).collect();
                let Some(last) = descriptors.iter().rposition(|d| Self::is_stuck(*d)) else { continue };
                let at = run.first as usize;
                // The pages that stay in use. A single segment comes back without its tail, and a run of a class is
                // shortened behind its last segment that stays.
                let (from, end) = match run.class {
                    Some(_) if Self::is_single(run) && !Self::is_stuck(descriptors[0]) => {
                        (run.alone / PAGE, run.pages as usize)
                    }
                    Some(class) if !Self::is_single(run) => (0, ((last + 1) * class.stride()).div_ceil(PAGE)),
                    _ => (0, run.pages as usize),
                };
                found += fitting(page, free_from, at + from);
                free_from = at + end;
                if let Placement::Class(class) = placement {
                    // SAFETY: the descriptors of a run are alive as long as the run.
                    let fits = |d: &&NonNull<Descriptor>| unsafe { d.as_ref() }.class() == Some(class);
                    found += descriptors.iter().filter(fits).filter(|d| !Self::is_stuck(**d)).count();
                }
                if found >= count {
                    return true;
                }
            }
            found += fitting(page, free_from, e.pages as usize);
            if found >= count {
                return true;
            }
        }
        found >= count
    }

    /// Whether [`Arena::take_tightly`] would serve all of these now, one after the other. Works on a copy of the set of free
    /// runs.
    pub(crate) fn serves_all(&self, takes: impl IntoIterator<Item = (Placement, usize)>) -> bool {
        let mut free = self.free.clone();
        let mut listed = vec![0; CLASSES];
        for (_, run) in &self.runs {
            if let Some(class) = run.class {
                listed[class.index()] += run.list.len() as usize;
            }
        }
        takes.into_iter().all(|(placement, count)| {
            let (mut pages, align) = placement.fresh_pages();
            if let Placement::Class(class) = placement {
                let listed = &mut listed[class.index()];
                if *listed == 0 {
                    let longest = free.last().map_or(0, |f| f.0 as usize);
                    pages = class.pages_of(count).min(class.shape().pages as usize).min(longest);
                    *listed = pages * PAGE / class.stride();
                    if *listed == 0 {
                        return false;
                    }
                } else {
                    pages = 0;
                }
                *listed -= 1;
            }
            if pages == 0 {
                return true;
            }
            let pages = pages as u32;
            let starts = |run: &(u32, u32, u32)| Some((*run, self.aligned_start(*run, pages, align)?));
            let Some((run, start)) = free.range((pages, 0, 0)..).find_map(starts) else { return false };
            let (len, extent, first) = run;
            free.remove(&run);
            let left = [(start - first, first), (first + len - start - pages, start + pages)];
            free.extend(left.into_iter().filter(|left| left.0 > 0).map(|(len, at)| (len, extent, at)));
            true
        })
    }

    /// Whether a placement could be served if `cached(class)` segments of each class came back from the caches. `false`
    /// is certain. `true` is not, since it is not known which runs the cached segments belong to.
    pub(crate) fn could_reclaim(&self, placement: Placement, cached: impl Fn(Class) -> usize) -> bool {
        let (need, align) = placement.fresh_pages();
        if let Placement::Class(class) = placement {
            if cached(class) > 0 {
                return true;
            }
        }
        let cached: Vec<usize> = Class::all().map(cached).collect();
        self.extents.iter().any(|(_, e)| {
            let page = e.base.as_ptr().addr() / PAGE;
            let fits = |from: usize, end: usize| (page + from).next_multiple_of(align) - page + need <= end;
            let mut free_from = 0;
            // A window is no free memory for others.
            let windows = self.windows.iter().map(|(_, w)| w);
            let mut windows: Vec<(usize, usize)> = windows
                .filter(|w| std::ptr::eq(&self.extents[w.extent as usize], e))
                .map(|w| (w.first as usize, w.end as usize))
                .collect();
            windows.sort_unstable_by_key(|window| std::cmp::Reverse(window.0));
            for (at, number) in &e.runs {
                let at = *at as usize;
                let run = &self.runs[*number as usize];
                while let Some((first, end)) = windows.last().copied().filter(|window| window.0 <= at) {
                    windows.pop();
                    if fits(free_from, first) {
                        return true;
                    }
                    free_from = free_from.max(end);
                }
                if run.window.is_some() {
                    continue;
                }
                // In a single segment's run only the tail counts. If the single segment is back, its tail is out: else
                // the run would be dissolved.
                let segments = if Self::is_single(run) { 1 } else { run.count as usize };
                let out = segments.saturating_sub(run.list.len() as usize);
                // The pages of the run that stay in use. For a class's run it assumes the best case: what stays out
                // lies in the first pages.
                let stays = match run.class {
                    Some(class) if run.alone == 0 => {
                        let out = out.saturating_sub(cached[class.index()]);
                        (out * class.stride()).div_ceil(PAGE).min(run.pages as usize)
                    }
                    _ => run.pages as usize,
                };
                if stays > 0 {
                    if fits(free_from, at) {
                        return true;
                    }
                    free_from = at + stays;
                }
            }
            while let Some((first, end)) = windows.pop() {
                if fits(free_from, first) {
                    return true;
                }
                free_from = free_from.max(end);
            }
            fits(free_from, e.pages as usize)
        })
    }
}
