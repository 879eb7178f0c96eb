//! What a worker does with the chunks that it owns, by stage.

use super::*;

impl Worker {
    /// Moves a chunk on, if it can be.
    pub(super) fn step(&mut self, n: usize, stage: Stage) -> Step {
        match stage {
            Stage::Ready(host) if self.is_stopped(n) => self.stopped(host, None),
            Stage::Ready(host) => self.ready(n, host),
            Stage::Collecting { flight, lent, slot, done } => match (done.get().cloned(), lent) {
                (None, lent) => Step::Same(Stage::Collecting { flight, lent, slot, done }),
                (Some(Ok(())), Some(lent)) => Step::Moved(Stage::Collected(Host::Lent(lent), Some(slot))),
                // The table's copy comes before the kernel on the same stream, so it is complete.
                (Some(Ok(())), None) => match flight.end() {
                    Ok(Some(buf)) => Step::Moved(Stage::Collected(Host::Segment(buf), Some(slot))),
                    other => self.lost(n, other.err(), Some(slot)),
                },
                (Some(Err(error)), _) => self.lost(n, Some(error), Some(slot)),
            },
            Stage::Collected(host, slot) if self.is_stopped(n) => self.stopped(host, slot),
            Stage::Collected(host, slot) => self.copy(n, host, slot),
            Stage::Copying { flight, done } => {
                if !flight.is_over() {
                    return Step::Same(Stage::Copying { flight, done });
                }
                self.copied(n, flight.end(), done)
            }
            Stage::Spreading(done) => match done.get() {
                Some(said) => Step::Ended(said.clone().into()),
                None => Step::Same(Stage::Spreading(done)),
            },
            Stage::Landed(buf) if self.is_stopped(n) => self.stopped(Host::Segment(buf), None),
            landed @ Stage::Landed(_) => Step::Same(landed),
            Stage::Refused { ticket, error, slot } => match ticket.timeline.poll_complete(ticket.seq) {
                Ok(false) => Step::Same(Stage::Refused { ticket, error, slot }),
                Ok(true) | Err(_) => self.lost(n, Some(error), slot),
            },
        }
    }

    /// Sends a chunk off, by way of a slot of the ring or without.
    fn ready(&mut self, n: usize, host: Host) -> Step {
        let Owned { job, packed, .. } = &self.owned[n];
        let direction = job.direction;
        let slot =
            if packed.way == Way::Ring { self.engine.ring.take(&self.engine.device) } else { Take::None };
        match slot {
            Take::Full if !self.is_slow(direction) => Step::Same(Stage::Ready(host)),
            Take::Full | Take::None => self.copy(n, host, None),
            Take::Slot(slot) if direction == Direction::Down => self.collect(n, host, slot),
            Take::Slot(slot) => self.copy(n, host, Some(slot)),
        }
    }

    /// Whether launches take so long, if there are any, that a chunk in this direction goes without the ring.
    pub(super) fn is_slow(&self, direction: Direction) -> bool {
        self.engine.spreaders.as_ref().is_none_or(|both| both[direction as usize].is_slow())
    }

    /// The table of a chunk that has no segment: in a small one of its own, which returns by itself.
    fn table(&self, packed: &Packed) -> Option<PinnedBuf> {
        let pool = &self.engine.segments.pool;
        let mut table = pool.for_copier((packed.rows * ROW).into(), crate::pool::Waiter::Retry).ok()?;
        // SAFETY: checked out with room for the rows; segments start on a multiple of 64.
        unsafe { packed.write_table(table.as_mut_ptr()) };
        Some(table)
    }

    /// Has the bytes of a chunk collected in a slot.
    fn collect(&mut self, n: usize, host: Host, slot: Slot) -> Step {
        let packed = &self.owned[n].packed;
        let at = packed.table_at();
        let (mut table, from, lent) = match host {
            Host::Segment(buf) => (buf, at, None),
            Host::Lent(lent) => match self.table(packed) {
                Some(table) => (table, 0, Some(lent)),
                None => {
                    self.engine.ring.give(slot);
                    return self.copy(n, Host::Lent(lent), None);
                }
            },
        };
        let Some(both) = &self.engine.spreaders else {
            return self.lost(n, Some(Error::Internal("a slot without kernels")), Some(slot));
        };
        // SAFETY: within the segment.
        let src = unsafe { table.as_mut_ptr().add(from) };
        let copy = transfer(Direction::Up, src, slot.at(at), packed.rows * ROW);
        let (spreader, ring) = (&both[Direction::Down as usize], slot.memory.allocation());
        // On the kernel's stream, so that the kernel comes after it. SAFETY: within the segment and the slot.
        let sent =
            unsafe { self.engine.submit(spreader.stream(), Host::Segment(table), &[copy], ring, None) };
        match sent {
            Ok(flight) => {
                let (entry, done) = self.entry(n, &slot);
                spreader.add(entry);
                Step::Moved(Stage::Collecting { flight, lent, slot, done })
            }
            Err(refusal) => self.refused(n, refusal, Some(slot)),
        }
    }

    /// What a kernel does for a chunk in a slot, which is not given back then.
    fn entry(&self, n: usize, slot: &Slot) -> (Entry, Done) {
        let (Owned { job, packed, .. }, done) = (&self.owned[n], Done::default());
        let (run, memories, ring) = (packed.spread(slot), job.memories.clone(), slot.memory.allocation());
        (Entry { run, memories, ring, slot: None, done: done.clone() }, done)
    }

    /// Submits the copies of a chunk: between the host and the slot, or the places on the device.
    fn copy(&mut self, n: usize, mut host: Host, mut slot: Option<Slot>) -> Step {
        let Owned { job, chunk, packed, .. } = &self.owned[n];
        let (direction, engine) = (job.direction, &self.engine);
        if !engine.may_send(direction, job.priority, chunk.bytes) {
            if direction == Direction::Down {
                return Step::Same(Stage::Collected(host, slot));
            }
            // It has nothing in the slot yet.
            slot.into_iter().for_each(|slot| engine.ring.give(slot));
            return Step::Same(Stage::Ready(host));
        }
        let mut transfers = packed.transfers(direction, slot.as_ref());
        if let (Direction::Up, Host::Lent(lent), Some(taken)) = (direction, &mut host, &slot) {
            match self.table(packed) {
                Some(mut table) => {
                    let place = taken.at(packed.table_at());
                    transfers.push(transfer(direction, table.as_mut_ptr(), place, packed.rows * ROW));
                    lent.add(table);
                }
                None => {
                    transfers = packed.transfers(direction, None);
                    slot.take().into_iter().for_each(|slot| engine.ring.give(slot));
                }
            }
        }
        count(&engine.counters, |stats| {
            let bytes = match (&slot, &host) {
                (Some(_), _) => &mut stats.ring_bytes,
                (None, Host::Segment(_)) => &mut stats.batch_bytes,
                (None, Host::Lent(_)) => &mut stats.in_place_bytes,
            };
            *bytes += chunk.bytes as u64;
        });
        let memories: Arc<dyn Retain> = match &slot {
            Some(slot) => slot.memory.allocation(),
            None => job.memories.clone(),
        };
        let stream = engine.stream(direction, job.priority);
        let written = (direction == Direction::Down).then_some(packed.data);
        // SAFETY: within the segment, or what is lent, as it was laid out, and within the slot or the job's memory.
        match unsafe { engine.submit(stream, host, &transfers, memories, written) } {
            Ok(flight) => {
                let (then, done) = match slot {
                    None => (Then::Nothing, None),
                    Some(slot) if direction == Direction::Down => (Then::Give(slot), None),
                    Some(slot) => {
                        let (entry, done) = self.entry(n, &slot);
                        (Then::Spread(Entry { slot: Some(slot), ..entry }), Some(done))
                    }
                };
                engine.sent(direction, job.priority, Some((flight.ticket().clone(), then)));
                Step::Moved(Stage::Copying { flight, done })
            }
            Err(refusal) => {
                engine.sent(direction, job.priority, None);
                self.refused(n, refusal, slot)
            }
        }
    }

    /// The copies of a chunk have ended.
    fn copied(&mut self, n: usize, ended: Result<Option<PinnedBuf>>, done: Option<Done>) -> Step {
        match (self.owned[n].job.direction, ended) {
            (_, Err(error)) => self.lost(n, Some(error), None),
            (Direction::Up, Ok(buf)) => {
                self.owned[n].staged = false;
                buf.into_iter().for_each(|buf| self.engine.segments.give(buf));
                done.map_or(Step::Ended(End::Arrived), |done| Step::Moved(Stage::Spreading(done)))
            }
            (Direction::Down, Ok(None)) => Step::Ended(End::Arrived),
            (Direction::Down, Ok(Some(buf))) => Step::Moved(Stage::Landed(buf)),
        }
    }

    // --- ends --------------------------------------------------------------------------------------------------------

    /// A chunk has failed. Its segment, if it has one, is not this worker's any more, and a slot may still be in use.
    fn lost(&mut self, n: usize, error: Option<Error>, slot: Option<Slot>) -> Step {
        slot.into_iter().for_each(|slot| self.engine.ring.lose(slot));
        if self.owned[n].staged {
            self.engine.segments.gone();
        }
        Step::Ended(End::Failed(error.unwrap_or(Error::Internal("a chunk has lost its segment"))))
    }

    /// The driver has refused a copy of a chunk.
    fn refused(&mut self, n: usize, refusal: Refusal, slot: Option<Slot>) -> Step {
        let Refusal { error, ticket } = refusal;
        match ticket {
            Some(ticket) => Step::Moved(Stage::Refused { ticket, error, slot }),
            None => self.lost(n, Some(error), slot),
        }
    }

    fn is_stopped(&self, n: usize) -> bool {
        self.owned[n].job.is_stopped()
    }

    /// Ends a chunk of a job that has stopped, while no copy uses its memory.
    fn stopped(&self, host: Host, slot: Option<Slot>) -> Step {
        slot.into_iter().for_each(|slot| self.engine.ring.give(slot));
        if let Host::Segment(buf) = host {
            self.engine.segments.give(buf);
        }
        Step::Ended(End::Dropped)
    }
}
