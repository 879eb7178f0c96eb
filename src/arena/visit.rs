//! Visiting the segments of all runs, to count or to list them. Nothing is changed.

use super::*;

impl Arena {
    /// Visits segments that are given out: those that their run's list does not hold. `visit` gets a segment's place,
    /// its descriptor and the bytes that it was given. A place is a number that no other segment has at the same time;
    /// segments are visited in its order.
    ///
    /// Begins with the run of number `from` and stops behind the run with which it has looked at `enough` descriptors
    /// or more. Returns the number to go on from, if there may be more. `elsewhere` are segments to leave out, by their
    /// runs' numbers and their descriptors' addresses.
    pub(crate) fn for_each_given(
        &self,
        from: usize,
        enough: usize,
        elsewhere: &[(u32, usize)],
        mut visit: impl FnMut(u64, &Descriptor, usize),
    ) -> Option<usize> {
        // The runs to visit, and where in `absent` the flags of each of them begin.
        let (mut runs, mut descriptors, mut next) = (Vec::new(), 0, None);
        for number in from..self.runs.capacity() {
            let run = self.runs.get(number);
            if descriptors >= enough && run.is_some() {
                next = Some(number);
                break;
            }
            runs.push(run.map(|run| (run, descriptors)));
            descriptors += run.map_or(0, |run| run.count as usize);
        }
        let mut absent = vec![false; descriptors];
        let mut leave_out = |run: &Run, start: usize, descriptor: usize| {
            let index = (descriptor - run.descriptors.as_ptr().addr()) / size_of::<Descriptor>();
            // A descriptor that a shortened run no longer uses has no flag.
            if index < run.count as usize {
                absent[start + index] = true;
            }
        };
        for (run, start) in runs.iter().flatten() {
            run.list
                .iter()
                .chain(run.held.iter())
                .for_each(|descriptor| leave_out(run, *start, std::ptr::from_ref(descriptor).addr()));
        }
        for (number, descriptor) in elsewhere {
            let index = (*number as usize).checked_sub(from);
            if let Some(Some((run, start))) = index.and_then(|index| runs.get(index)) {
                leave_out(run, *start, *descriptor);
            }
        }
        for (number, run) in (from as u64..).zip(runs) {
            let Some((run, start)) = run else { continue };
            for n in (0..run.count).filter(|n| !absent[start + *n as usize]) {
                // SAFETY: the run's own descriptor, which is alive as long as the run.
                let descriptor = unsafe { self.descriptor(run, n).as_ref() };
                let granted = descriptor.class().map_or(run.alone, Class::stride);
                // A single segment that is back while its tail is out has no bytes.
                if granted > 0 {
                    visit(number << 32 | u64::from(n), descriptor, granted);
                }
            }
        }
        next
    }

    /// Visits each run that has segments of a class: the class, how many there are, and how many of them are free.
    pub(crate) fn for_each_class(&self, mut visit: impl FnMut(Class, u64, u64)) {
        for (_, run) in &self.runs {
            if let Some(class) = run.class {
                let segments = if Self::is_single(run) { 1 } else { run.count };
                visit(class, segments.into(), (run.list.len() + run.held.len()).into());
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
