//! Pages: adding and removing extents, and dividing them into free runs and runs in use.
//!
//! Each extent has a map with an entry for each page. Only those of a run's first and last page are
//! valid, so freeing pages takes two look-ups to find and join free neighbours. A set beside the
//! maps keeps all free runs ordered by size and then address.

use super::*;

impl Arena {
    /// Adds an extent of `len` bytes at `base`. Both are multiples of [`PAGE`], and `len` is at
    /// most [`MAX_EXTENT`].
    ///
    /// # Safety
    /// The memory stays mapped until [`Arena::retire`] has removed the extent or the arena is
    /// dropped, and nothing but the arena's segments uses it.
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
            stuck: false,
        }) as u32;
        self.total += len;
        self.insert_free(extent, 0, pages);
    }

    /// Notes that the extent at `base`, if it is still here, is now pinned, too.
    pub(crate) fn pinned_after_all(&mut self, base: NonNull<u8>) {
        if let Some((_, extent)) = self.extents.iter_mut().find(|(_, e)| e.base == base && !e.pinned) {
            extent.pinned = true;
        }
    }

    /// Removes a region's extents, if no segment of them is given out: their memory is the caller's
    /// again. Returns their bytes. `None` also for a region that is gone: of several callers that
    /// remove one region only the first gets it.
    pub(crate) fn retire(&mut self, region: RegionId) -> Option<usize> {
        let found = self.regions().remove(&region).filter(|found| found.idle)?;
        let is_mine = |(i, e): (usize, &ArenaExtent)| (e.region == region).then_some((i, e.pages));
        for (extent, pages) in self.extents.iter().filter_map(is_mine).collect::<Vec<_>>() {
            self.extents.remove(extent);
            self.remove_free(extent as u32, 0, pages);
        }
        self.total -= found.bytes;
        Some(found.bytes)
    }

    /// The regions.
    pub(crate) fn regions(&self) -> BTreeMap<RegionId, RegionUse> {
        let mut regions = BTreeMap::new();
        for (_, e) in &self.extents {
            let new = RegionUse { bytes: 0, idle: true, stuck: false };
            let region = regions.entry(e.region).or_insert(new);
            region.bytes += e.pages as usize * PAGE;
            region.idle &= e.map[0] == FREE | e.pages;
            region.stuck |= e.stuck;
        }
        regions
    }

    /// Bytes that are plain memory in place of pinned memory.
    pub(crate) fn unpinned(&self) -> usize {
        let plain = self.extents.iter().filter(|(_, e)| !e.pinned);
        plain.map(|(_, e)| e.pages as usize * PAGE).sum()
    }

    /// Adds a free run outside of windows. Nothing, if it has no pages.
    pub(super) fn insert_free(&mut self, extent: u32, first: u32, pages: u32) {
        if pages == 0 {
            return;
        }
        let map = &mut self.extents[extent as usize].map;
        map[first as usize] = FREE | pages;
        map[(first + pages - 1) as usize] = FREE | pages;
        self.free.insert((pages, extent, first));
        self.unheld += pages as usize * PAGE;
    }

    /// Removes a free run outside of windows. Nothing, if it has no pages.
    pub(super) fn remove_free(&mut self, extent: u32, first: u32, pages: u32) {
        self.free.remove(&(pages, extent, first));
        self.unheld -= pages as usize * PAGE;
    }

    /// Takes `pages` pages from the smallest free run that fits: aligned ones from its high end, or
    /// the first ones. The rest stays free. Returns extent and first page. `align` is in pages.
    pub(super) fn take_pages(&mut self, pages: usize, align: usize, high: bool) -> Option<(u32, u32)> {
        let pages = u32::try_from(pages).ok()?;
        let mut fitting = self.free.range((pages, 0, 0)..);
        let ((len, extent, first), start) = fitting.find_map(|&(len, extent, first)| {
            let page = self.extents[extent as usize].base.as_ptr().addr() / PAGE + first as usize;
            let last = (page + (len - pages) as usize) / align * align;
            let start = if high { first + last.checked_sub(page)? as u32 } else { first };
            Some(((len, extent, first), start))
        })?;
        self.remove_free(extent, first, len);
        self.insert_free(extent, first, start - first);
        self.insert_free(extent, start + pages, first + len - start - pages);
        Some((extent, start))
    }

    /// Frees pages outside of windows, and joins them with the free runs beside them. Returns the
    /// first page of the run that they make.
    pub(super) fn give_pages(&mut self, extent: u32, mut first: u32, mut pages: u32) -> u32 {
        let e = &self.extents[extent as usize];
        let free = |entry: Option<&u32>| {
            entry.filter(|entry| **entry & (FREE | HELD) == FREE).map_or(0, |e| free_len(*e))
        };
        let left = free(first.checked_sub(1).and_then(|page| e.map.get(page as usize)));
        let right = free(e.map.get((first + pages) as usize));
        self.remove_free(extent, first - left, left);
        self.remove_free(extent, first + pages, right);
        first -= left;
        pages += left + right;
        self.insert_free(extent, first, pages);
        first
    }

    /// The number of segments of a placement for which the extents have room when empty.
    pub(crate) fn fits(&self, placement: Placement) -> usize {
        let (need, align) = placement.fresh_pages();
        let in_extent = |(_, e): (usize, &ArenaExtent)| {
            let (first, pages) = (e.base.as_ptr().addr() / PAGE, e.pages as usize);
            match placement {
                Placement::Class(class) => pages * PAGE / class.stride(),
                Placement::Pages { .. } => {
                    let rest = pages.checked_sub(first.next_multiple_of(align) - first + need);
                    rest.map_or(0, |rest| 1 + rest / need.next_multiple_of(align))
                }
            }
        };
        self.extents.iter().map(in_extent).sum()
    }
}
