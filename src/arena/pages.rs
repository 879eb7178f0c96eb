//! Pages: adding and removing extents, and dividing them into free runs and runs in use.
//!
//! Each extent has a map with an entry for each page. Only the entries of a run's first and last page are valid. So
//! freeing pages takes two look-ups to see whether the neighbours in the extent are free, and joins those that are. A
//! set beside the maps keeps all free runs ordered by size and then address, to find the smallest that fits.

use super::*;

impl Arena {
    /// Adds an extent of `len` bytes at `base`. Both are multiples of [`PAGE`], and `len` is at most [`MAX_EXTENT`].
    ///
    /// # Safety
    /// The memory stays mapped until [`Arena::retire`] has removed the extent or the arena is dropped, and nothing but
    /// the arena's segments uses it.
    pub(crate) unsafe fn add_extent(
        &mut self,
        region: RegionId,
        base: NonNull<u8>,
        len: usize,
        pinned: bool,
    ) {
        debug_assert!(base.as_ptr().addr() % PAGE == 0 && len % PAGE == 0 && len > 0 && len <= MAX_EXTENT);
        let pages = (len / PAGE) as u32;
        let extent = self.extents.insert(ArenaExtent {
            base,
            pages,
            region,
            pinned,
            map: vec![0; pages as usize],
            stuck: Vec::new(),
        }) as u32;
        self.total += len;
        if !pinned {
            self.unpinned += len;
        }
        self.insert_free(extent, 0, pages);
    }

    /// Notes that the extent at `base` is pinned, which was not. Nothing, if it is not here any more.
    pub(crate) fn pinned_after_all(&mut self, base: NonNull<u8>) {
        if let Some((_, extent)) = self.extents.iter_mut().find(|(_, e)| e.base == base && !e.pinned) {
            extent.pinned = true;
            self.unpinned -= extent.pages as usize * PAGE;
        }
    }

    /// Removes a region's extents, if no segment of them is given out. Their memory is the caller's again: base, length
    /// in bytes, and whether it is pinned. `None` also for a region that is not here any more: of several callers that
    /// remove one region only the first gets it.
    pub(crate) fn retire(&mut self, region: RegionId) -> Option<Vec<(NonNull<u8>, usize, bool)>> {
        self.release_idle();
        let whole = |e: &ArenaExtent| e.map[0] == FREE | e.pages;
        if self.extents.iter().any(|(_, e)| e.region == region && !whole(e)) {
            return None;
        }
        let mine: Vec<usize> =
            self.extents.iter().filter(|(_, e)| e.region == region).map(|(i, _)| i).collect();
        if mine.is_empty() {
            return None;
        }
        let out = mine.into_iter().map(|i| {
            let e = self.extents.remove(i);
            let len = e.pages as usize * PAGE;
            self.free.remove(&(e.pages, i as u32, 0));
            self.free_pages -= e.pages as usize;
            self.total -= len;
            if !e.pinned {
                self.unpinned -= len;
            }
            (e.base, len, e.pinned)
        });
        Some(out.collect())
    }

    /// The regions, each with its bytes and how many of them are in free runs.
    pub(crate) fn regions(&self) -> Vec<(RegionId, usize, usize)> {
        let mut list: Vec<(RegionId, usize, usize)> = Vec::new();
        for (i, e) in &self.extents {
            let free =
                self.free.iter().filter(|f| f.1 == i as u32).map(|f| f.0 as usize * PAGE).sum::<usize>();
            let len = e.pages as usize * PAGE;
            match list.iter_mut().find(|r| r.0 == e.region) {
                Some(r) => {
                    r.1 += len;
                    r.2 += free;
                }
                None => list.push((e.region, len, free)),
            }
        }
        list
    }

    pub(super) fn insert_free(&mut self, extent: u32, first: u32, pages: u32) {
        let map = &mut self.extents[extent as usize].map;
        map[first as usize] = FREE | pages;
        map[(first + pages - 1) as usize] = FREE | pages;
        self.free.insert((pages, extent, first));
        self.free_pages += pages as usize;
    }

    pub(super) fn remove_free(&mut self, extent: u32, first: u32, pages: u32) {
        self.free.remove(&(pages, extent, first));
        self.free_pages -= pages as usize;
    }

    /// The first aligned page of a free run, if `pages` pages from it on fit into the run. `align` is in pages.
    pub(super) fn aligned_start(&self, run: (u32, u32, u32), pages: u32, align: usize) -> Option<u32> {
        let (len, extent, first) = run;
        let page = self.extents[extent as usize].base.as_ptr().addr() / PAGE + first as usize;
        let skip = page.next_multiple_of(align) - page;
        (skip + pages as usize <= len as usize).then(|| first + skip as u32)
    }

    /// The last aligned page of a free run from which on `pages` pages fit into the run. `align` is in pages.
    fn last_start(&self, run: (u32, u32, u32), pages: u32, align: usize) -> Option<u32> {
        let (len, extent, first) = run;
        let page = self.extents[extent as usize].base.as_ptr().addr() / PAGE + first as usize;
        let start = (page + len.checked_sub(pages)? as usize) / align * align;
        Some(first + start.checked_sub(page)? as u32)
    }

    /// Takes `pages` pages from the smallest free run that fits: from its high end, or else from its low end. What lies
    /// before and after them stays free. Returns the extent and the first page. `align` is in pages.
    pub(super) fn take_pages(&mut self, pages: usize, align: usize, high: bool) -> Option<(u32, u32)> {
        let pages = u32::try_from(pages).ok()?;
        let start = |run| match high {
            true => self.last_start(run, pages, align),
            false => self.aligned_start(run, pages, align),
        };
        let mut fitting = self.free.range((pages, 0, 0)..);
        let (run, start) = fitting.find_map(|&run| start(run).map(|start| (run, start)))?;
        let (len, extent, first) = run;
        self.remove_free(extent, first, len);
        if start > first {
            self.insert_free(extent, first, start - first);
        }
        if first + len > start + pages {
            self.insert_free(extent, start + pages, first + len - start - pages);
        }
        Some((extent, start))
    }

    /// Frees pages, which lie in this window, and joins them with the free runs beside them. No free run crosses the edge
    /// of a window's range.
    pub(super) fn give_pages(
        &mut self,
        extent: u32,
        mut first: u32,
        mut pages: u32,
        window: Option<WindowId>,
    ) {
        let e = &self.extents[extent as usize];
        let (from, end, held) = match window.and_then(|id| self.range_at(id, extent, first)) {
            Some(range) => (range.first, range.end, HELD),
            None => (0, e.pages, 0),
        };
        let joins = |entry: &u32| entry & (FREE | HELD) == FREE | held;
        let left = first.checked_sub(1).filter(|page| *page >= from).map(|page| e.map[page as usize]);
        let right = Some(first + pages).filter(|page| *page < end).map(|page| e.map[page as usize]);
        let [left, right] = [left, right].map(|entry| entry.filter(joins).map_or(0, free_len));
        if left > 0 {
            self.take_free(extent, first - left, left, held);
        }
        if right > 0 {
            self.take_free(extent, first + pages, right, held);
        }
        first -= left;
        pages += left + right;
        match window {
            Some(id) => self.insert_held(id, extent, first, pages),
            None => self.insert_free(extent, first, pages),
        }
    }

    /// Takes a free run out of the books, in a window (`held` is [`HELD`]) or outside of one.
    fn take_free(&mut self, extent: u32, first: u32, pages: u32, held: u32) {
        if held == 0 {
            self.remove_free(extent, first, pages);
        } else {
            self.free_pages -= pages as usize;
            self.held_pages -= pages as usize;
        }
    }

    /// Whether `count` segments of a placement could be served if every segment that is not quarantined came back, and
    /// nothing else was served. `false` is certain as long as no extent is added. Only the runs that have a quarantined
    /// segment are looked at.
    pub(crate) fn could_hold(&self, placement: Placement, count: usize) -> bool {
        let mut found = 0;
        for (_, e) in &self.extents {
            let page = e.base.as_ptr().addr() / PAGE;
            let mut stuck: Vec<&Run> = e.stuck.iter().map(|number| &self.runs[*number as usize]).collect();
            stuck.sort_unstable_by_key(|run| run.first);
            let mut from = 0;
            for run in stuck {
                found += fitting(placement, page + from as usize, page + run.first as usize);
                if run.class.map(Placement::Class) == Some(placement) {
                    found += (0..run.count).filter(|n| !Self::is_stuck(self.descriptor(run, *n))).count();
                }
                from = run.first + run.pages;
            }
            found += fitting(placement, page + from as usize, page + e.pages as usize);
            if found >= count {
                return true;
            }
        }
        found >= count
    }

    fn is_stuck(descriptor: NonNull<Descriptor>) -> bool {
        // SAFETY: the descriptors of a run are alive as long as the run, and the caller has the run.
        unsafe { descriptor.as_ref() }.word().state() == state::QUARANTINED
    }
}

/// How many segments of a placement fit at most between two pages, which are counted from address 0.
fn fitting(placement: Placement, from: usize, end: usize) -> usize {
    let (need, align) = placement.fresh_pages();
    match placement {
        Placement::Class(class) => (end - from) * PAGE / class.stride(),
        Placement::Pages { .. } => {
            let rest = end.checked_sub(from.next_multiple_of(align) + need);
            rest.map_or(0, |rest| 1 + rest / need.next_multiple_of(align))
        }
    }
}
