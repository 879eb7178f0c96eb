//! The outlook: what could be served if segments came back, which they may or may not do.
//!
//! Who asks decides by it whether to wait, or to take back what others have cached. So `false` is certain here, and
//! `true` is not: a wait that can never end has to end with an error, and a request that would be in vain costs others
//! nothing; one that may succeed is tried.

use super::*;

impl Arena {
    /// Whether so many of a placement could be served if everything that is not quarantined came back. `false` is
    /// certain; `true` is not, for more than one, since what is aligned or of other classes may be in the way. `stuck`
    /// says what is quarantined, if anything is.
    pub(crate) fn could_serve(
        &self,
        placement: Placement,
        count: usize,
        stuck: Option<&dyn Fn(&Descriptor) -> bool>,
    ) -> bool {
        let descriptors = |run: &Run| (0..run.count).map(|i| self.descriptor(run, i)).collect::<Vec<_>>();
        // SAFETY: descriptors of a run are alive as long as it is.
        let is_stuck = |descriptor: &NonNull<Descriptor>| {
            stuck.is_some_and(|stuck| stuck(unsafe { descriptor.as_ref() }))
        };
        let (need, align) = placement.fresh_pages();
        let fitting = |page: usize, first: usize, end: usize| match placement {
            Placement::Class(class) => (end - first) * PAGE / class.stride(),
            Placement::Pages { .. } => {
                let start = (page + first).next_multiple_of(align) - page;
                end.checked_sub(start + need).map_or(0, |rest| 1 + rest / need.next_multiple_of(align))
            }
        };
        let mut found = 0;
        for (_, e) in &self.extents {
            let page = e.base.as_ptr().addr() / PAGE;
            let (mut at, mut free_from) = (0, 0);
            while stuck.is_some() && at < e.pages as usize {
                let entry = e.map[at];
                if entry & FREE != 0 {
                    at += (entry & !FREE) as usize;
                    continue;
                }
                let run = &self.runs[entry as usize];
                let descriptors = descriptors(run);
                if descriptors.iter().any(is_stuck) {
                    found += fitting(page, free_from, at);
                    free_from = at + run.pages as usize;
                    if let Placement::Class(class) = placement {
                        // SAFETY: as above.
                        let fits = |s: &&NonNull<Descriptor>| unsafe { s.as_ref() }.class() == Some(class);
                        found += descriptors.iter().filter(fits).filter(|s| !is_stuck(s)).count();
                    }
                }
                at += run.pages as usize;
            }
            found += fitting(page, free_from, e.pages as usize);
        }
        found >= count
    }

    /// Whether a placement could be served if so many segments of each class came back from where they are cached.
    /// `false` is certain; `true` is not, since nobody knows of which runs they are.
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
            let (mut at, mut free_from) = (0, 0);
            while at < e.pages as usize {
                let entry = e.map[at];
                if entry & FREE != 0 {
                    at += (entry & !FREE) as usize;
                    continue;
                }
                let run = &self.runs[entry as usize];
                let end = at + run.pages as usize;
                // A single segment that is back has its tail out, or there would be no run.
                let segments = if Self::is_single(run) { 1 } else { run.count as usize };
                let out = segments.saturating_sub(run.list.len() as usize);
                // What of it stays where it is. Of a class's run, as little as possible: the first pages.
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
                at = end;
            }
            fits(free_from, e.pages as usize)
        })
    }
}
