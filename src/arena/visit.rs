//! Visiting the segments of all runs, to count or to list them. Nothing is changed.

use super::*;

impl Arena {
    /// The descriptor at an address in the run of this number, and the bytes that its segment was given. `None`: the run
    /// has no such descriptor.
    pub(crate) fn descriptor_at(&self, run: u32, address: usize) -> Option<(&Descriptor, usize)> {
        let run = self.runs.get(run as usize)?;
        let index = address.checked_sub(run.descriptors.as_ptr().addr())? / size_of::<Descriptor>();
        if index >= run.count as usize {
            return None;
        }
        // SAFETY: the run's own descriptor, which is alive as long as the run.
        let descriptor = unsafe { self.descriptor(run, index as u32).as_ref() };
        Some((descriptor, Self::segment_bytes(run)))
    }

    /// Visits each run that has segments of a class: the class, how many there are, and how many of them are free.
    pub(crate) fn for_each_class(&self, mut visit: impl FnMut(Class, u64, u64)) {
        for (_, run) in &self.runs {
            if let Some(class) = run.class {
                visit(class, run.count.into(), run.list.len().into());
            }
        }
    }

    /// Bytes of all regions that have a quarantined segment.
    pub(crate) fn stuck_regions(&self) -> usize {
        let mut found: Vec<RegionId> = Vec::new();
        for (_, e) in self.extents.iter().filter(|(_, e)| !e.stuck.is_empty()) {
            if !found.contains(&e.region) {
                found.push(e.region);
            }
        }
        let extents = self.extents.iter().filter(|(_, e)| found.contains(&e.region));
        extents.map(|(_, e)| e.pages as usize * PAGE).sum()
    }
}
