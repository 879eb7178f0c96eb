//! What the pipeline's workers do.
//!
//! Whoever has nothing to do takes, in this order, of the foreground first and then of all others: a chunk that has landed,
//! since draining it frees a segment; a chunk to fill; a chunk of memory that the device takes as it is. A worker waits for
//! nothing but the reading, copying or writing of its chunk: where no segment is free it rests until one is (where the
//! pipeline has none at all, one thread stands in the pool's queue), and what it has filled it leaves to the wire. One that
//! has nothing else to do lets a batch of windows go that has arrived, or attends to a chunk on the wire
//! ([`super::arrival`]).

use std::sync::Arc;
use std::time::Instant;

use crate::locks::MutexGuard;

use super::config::{Priority, Settings};
use super::direct;
use super::engine::{Engine, Live, State};
use super::job::{Body, Direction, End, Job, Kind, Landed};
use super::segments::Got;
use super::source::Fill;
use super::source::ours::Token;
use super::stats::Counters;
use super::window::{self, Window, Windows};
use super::wire::{self, InPlace, Load, Ready};
use crate::buffer::PinnedBuf;
use crate::error::{Error, Result};
use crate::foreign;

/// Who goes first.
const PRIORITIES: [Priority; 2] = [Priority::Foreground, Priority::Bulk];

/// What there is to do.
enum Task {
    Copy(Arc<Job>),
    Drain(Arc<Job>, Landed),
    Fill(Arc<Job>),
}

impl Engine {
    /// A worker's life.
    pub(super) fn work(&self) {
        crate::os::sleep_precisely();
        let mut state = self.state.lock();
        loop {
            if std::mem::take(&mut state.clear) {
                Direction::BOTH.into_iter().for_each(|direction| self.pump(&mut state, direction));
            }
            let events = state.share.events;
            match self.task(&mut state) {
                Some(Task::Drain(job, landed)) => self.drain(&mut state, &job, landed),
                Some(Task::Copy(job)) => self.copy(&mut state, &job),
                Some(Task::Fill(job)) => {
                    if self.fill(&mut state, &job) {
                        continue;
                    }
                    // What needs no segment goes past it, and what gives one back.
                    match self.other_task(&mut state) {
                        Some(Task::Drain(job, landed)) => self.drain(&mut state, &job, landed),
                        Some(Task::Copy(job)) => self.copy(&mut state, &job),
                        _ => {
                            if !self.release_windows(&mut state)
                                // Something may have come back while the pool was asked.
                                && state.share.events == events
                                && !self.attend(&mut state)
                            {
                                self.rest(&mut state);
                            }
                        }
                    }
                }
                None if self.release_windows(&mut state) => {}
                None if state.closing && state.jobs.is_empty() => return,
                None if self.attend(&mut state) => {}
                None => self.rest(&mut state),
            }
        }
    }

    fn task(&self, state: &mut State) -> Option<Task> {
        PRIORITIES.into_iter().find_map(|priority| {
            let drain = state.take_landed(priority);
            drain
                .or_else(|| state.next_to_fill(priority).map(|live| Task::Fill(live.job.clone())))
                .or_else(|| self.copies(state, priority).map(Task::Copy))
        })
    }

    /// Something that needs no segment.
    fn other_task(&self, state: &mut State) -> Option<Task> {
        PRIORITIES.into_iter().find_map(|priority| {
            state.take_landed(priority).or_else(|| self.copies(state, priority).map(Task::Copy))
        })
    }

    /// A transfer of memory that the device takes as it is, and whose next chunk may go now.
    pub(super) fn copies(&self, state: &State, priority: Priority) -> Option<Arc<Job>> {
        let next = state.jobs.iter().find(|live| {
            live.job.kind == Kind::Direct
                && live.job.priority == priority
                && live.behind.is_empty()
                && self.free(state, live.job.direction, priority)
                && live.job.has_next()
        });
        next.map(|live| live.job.clone())
    }

    /// Fills a chunk of an upload, and submits it if the wire takes it. `false`: not now.
    fn fill(&self, state: &mut MutexGuard<'_, State>, job: &Arc<Job>) -> bool {
        if job.kind == Kind::File {
            if let Some(done) = self.fill_by_window(state, job) {
                return done;
            }
        }
        let mut buf = match self.acquire(state, Direction::Up, job, true) {
            Got::Segment(buf) => buf,
            Got::NotNow => return false,
            Got::Failed(error) => {
                self.fail(state, job, error);
                return true;
            }
        };
        if job.priority == Priority::Bulk && state.next_to_fill(Priority::Foreground).is_some() {
            // It has come while we looked for a segment.
            self.give_back(state, Direction::Up, Some(buf));
            return true;
        }
        let Some((index, _)) = job.begin(1) else {
            self.give_back(state, Direction::Up, Some(buf));
            return true;
        };
        if job.kind == Kind::File {
            state.windows.tuner.begins(false, Instant::now());
        }
        let filled = self.outside(state, || {
            let chunk = job.plan.chunk(index)?;
            let lead = self.fill_from(job, chunk.at, chunk.len, &mut buf)?;
            Ok((chunk, lead))
        });
        match filled {
            Ok((chunk, lead)) => {
                let load = Load::Segment(buf, lead);
                self.submit(
                    state,
                    Ready { job: job.clone(), index, chunk, load, by: self.worker(), at_once: false },
                );
            }
            Err(error) => {
                self.give_back(state, Direction::Up, Some(buf));
                self.end(state, job, index, Err(error));
            }
        }
        true
    }

    /// Brings the next chunks of a file from a window of it. `None`: they are to be read. `Some(false)`: not now.
    fn fill_by_window(&self, state: &mut MutexGuard<'_, State>, job: &Arc<Job>) -> Option<bool> {
        let Settings { chunk, segment, segments, .. } = self.settings;
        if !self.device.context().driver().holds_pages()
            || !state.may_have_windows()
            || Direction::BOTH.into_iter().any(|direction| self.is_urgent(state, direction))
        {
            return None;
        }
        let most = window::window(segments * segment, chunk)?;
        let (count, faster) = (most / job.plan.chunk_len(), state.windows.tuner.windows());
        // (A lone rest is read: the call costs more than it saves.)
        let untouched = job.untouched();
        let last = job.plan.range(job.plan.count() - 1).1;
        let whole = if last < window::LEAST_CHUNK { untouched.saturating_sub(1) } else { untouched };
        let count = count.min(whole);
        if job.plan.pieces().len() > 1 || count < 2 || job.plan.chunk_len() < window::LEAST_CHUNK {
            return None;
        }
        let wanted = self.outside(state, || match job.body().as_ref().map(|body| &***body) {
            Some(Body::File(file)) => Ok(file.wants_windows(faster)),
            _ => Ok(false),
        });
        if wanted != Ok(true) {
            return None;
        }
        let engine = self.own.upgrade()?;
        if state.windows.registering {
            return Some(false);
        }
        if state.held(segment) + most > segments * segment {
            // Segments from when it was read are not needed now.
            let stash = state.take_stash();
            let some = !stash.is_empty();
            Self::drop_outside(state, stash);
            return Some(some);
        }
        let (first, count) = job.begin(count)?;
        let (at, last) = (job.plan.range(first).0, job.plan.range(first + count - 1));
        let len = (last.0 - at) as usize + last.1;
        state.windows.bytes += len;
        state.windows.open += 1;
        state.windows.registering = true;
        state.windows.tuner.begins(true, Instant::now());
        let opened = self.outside(state, || match job.body().as_ref().map(|body| &***body) {
            Some(Body::File(file)) => Ok(Window::open(&engine, file, at, len).inspect_err(|refused| {
                file.has_no_windows();
                if let Some(error) = refused {
                    Counters::add(&self.counters.windows_refused, 1);
                    crate::foreign::debug!(target: "pinpool::pipeline", file = &*file.shown_name(), %error, "read instead");
                }
            })),
            _ => Ok(Err(None)),
        });
        state.windows.registering = false;
        match opened.unwrap_or_else(|unwound| Err(Some(unwound))) {
            Ok(window) => {
                let window = Arc::new(window);
                for index in first..first + count {
                    let start = window.offset(job.plan.range(index).0);
                    match job.plan.chunk(index) {
                        Ok(chunk) => {
                            let load = Load::InPlace(window.clone() as Arc<dyn InPlace>, start);
                            self.submit(
                                state,
                                Ready { job: job.clone(), index, chunk, load, by: 0, at_once: true },
                            );
                        }
                        Err(error) => self.end(state, job, index, Err(error)),
                    }
                }
                Self::drop_outside(state, window);
            }
            Err(refused) => {
                state.windows.bytes -= len;
                state.windows.open -= 1;
                state.windows.tuner.refused(refused.is_some());
                if job.unbegin(first, count) {
                    self.finish(state, job);
                }
            }
        }
        // A thread that has found one registering may go on, and one that has found no room beside what was refused.
        self.call_all(state);
        self.made_room(state);
        Some(true)
    }

    /// The last chunk of a window has arrived.
    pub(super) fn window_gone(&self, close: impl FnOnce(&mut Windows)) {
        let mut state = self.state.lock();
        close(&mut state.windows);
        state.share.events += 1;
        // Whoever finds that there is nothing else to do sees to the batch.
        self.call_all(&state);
    }

    /// Lets a batch of windows go that has arrived, by somebody who has nothing else to do. Whether there was one.
    fn release_windows(&self, state: &mut MutexGuard<'_, State>) -> bool {
        let Some((batch, bytes)) = state.windows.batch() else { return false };
        // Before there is room: what is registered then comes behind it on the device's worker thread.
        Self::drop_outside(state, batch);
        state.windows.released(bytes);
        // Room for dozens of segments.
        self.call_all(state);
        self.made_room(state);
        true
    }

    /// Hands a filled chunk to the wire.
    pub(super) fn submit(&self, state: &mut MutexGuard<'_, State>, ready: Ready) {
        if ready.job.stopped() {
            // It was not there to be swept, and neither the wire nor the rate should hold up its end.
            return self.discard(state, ready);
        }
        let place = usize::from(ready.job.priority == Priority::Bulk);
        state.wires[Direction::Up as usize].ready[place].push_back(ready);
        self.pump(state, Direction::Up);
        state.share.events += 1;
        // The watcher may be asleep, and the rate, not the wire, in the way.
        self.bells[Direction::Up as usize].notify_one();
    }

    /// Fills a segment from the job's source: where in it the chunk starts.
    fn fill_from(&self, job: &Job, at: u64, len: usize, buf: &mut PinnedBuf) -> Result<usize> {
        match job.body().as_ref().map(|body| &***body) {
            Some(Body::File(file)) => {
                let lead = file.fill(at, len, buf, &self.counters)?;
                file.tapped(at, &buf[lead..], &|| job.stopped());
                Ok(lead)
            }
            Some(Body::Source(source)) => {
                let mut fill = Fill::new(buf, len, self.settings.fills);
                let filled = guarded(|| source.fill(at, &mut fill));
                let read = buf.len();
                filled.map_err(|error| read_error(&job.name, at + read as u64, &error))?;
                if read < len {
                    let (what, end) = (job.name.clone(), at + read as u64);
                    return Err(Error::Shrunk { what, end, len: job.plan.end() });
                }
                Ok(0)
            }
            _ => Err(Error::Closed),
        }
    }

    /// Copies a chunk of memory that the device takes as it is.
    fn copy(&self, state: &mut MutexGuard<'_, State>, job: &Arc<Job>) {
        let Some((index, _)) = job.begin(1) else { return };
        let (at, len) = job.plan.range(index);
        Self::takes_off(state, job.direction, job.priority, len);
        // Its watcher wakes us when the rate allows the next.
        self.bells[job.direction as usize].notify_one();
        let stream = self.stream(state, job.direction, job.priority);
        let copied = self.outside(state, || {
            let chunk = job.plan.chunk(index)?;
            match foreign::survive("a direct copy panicked: its transfer fails", || {
                direct::copy(&stream, &chunk, job.body().as_ref().map(|body| &***body))
            }) {
                Some(copied) => copied?,
                None => {
                    // The device may have the caller's memory still, which is the caller's alone when the chunk has ended.
                    stream.synchronize()?;
                    return Err(self.unwound());
                }
            }
            Ok(chunk.wanted())
        });
        state.wires[job.direction as usize].on[wire::place(job.priority)] -= 1;
        // First: to submit another one may take long.
        self.end(state, job, index, copied.map_err(|error| job.failed_at(at, error)));
        // What is staged may have waited for this place.
        self.pump(state, job.direction);
        state.share.events += 1;
        self.call(state);
    }

    /// Drains what has landed, and brings the next chunk on its way.
    pub(super) fn drain(&self, state: &mut MutexGuard<'_, State>, job: &Arc<Job>, landed: Landed) {
        let Landed { index, buf } = landed;
        let (at, len) = job.plan.range(index);
        let put = self.outside(state, || match job.body().as_ref().map(|body| &***body) {
            Some(Body::Sink(sink)) if !job.stopped() => match guarded(|| sink.put(at, &buf)) {
                Ok(()) => Ok(End::Arrived(len as u64)),
                Err(error) => Err(write_error(&job.name, sink.lies_at(at, Token), &error)),
            },
            _ => Ok(End::Dropped),
        });
        let put = put.unwrap_or_else(End::Failed);
        self.bring_back(state, Direction::Down, buf);
        self.end(state, job, index, put);
        self.pump(state, Direction::Down);
    }
}

impl State {
    /// An upload of which workers may fill the next chunk.
    fn next_to_fill(&self, priority: Priority) -> Option<&Live> {
        let may = |live: &&Live| {
            live.job.is_filled()
                && live.job.priority == priority
                && live.behind.is_empty()
                && live.job.has_next()
        };
        self.jobs.iter().find(may)
    }

    fn take_landed(&mut self, priority: Priority) -> Option<Task> {
        let at = self.landed.iter().position(|(job, _)| job.priority == priority)?;
        self.landed.remove(at).map(|(job, landed)| Task::Drain(job, landed))
    }
}

/// Calls the caller's code, which may panic: that ends its transfer, and not our thread.
fn guarded(call: impl FnOnce() -> std::io::Result<()>) -> std::io::Result<()> {
    foreign::call("a source or sink panicked: its transfer fails", call).unwrap_or_else(|| {
        Err(std::io::Error::other("it panicked; the panic's message is on standard error"))
    })
}

pub(super) fn read_error(what: &str, offset: u64, error: &std::io::Error) -> Error {
    Error::Read { what: what.into(), offset, kind: error.kind(), text: error.to_string() }
}

pub(super) fn write_error(what: &str, offset: u64, error: &std::io::Error) -> Error {
    Error::Write { what: what.into(), offset, kind: error.kind(), text: error.to_string() }
}

impl Job {
    /// Whether workers fill its chunks.
    fn is_filled(&self) -> bool {
        self.direction == Direction::Up && matches!(self.kind, Kind::Workers | Kind::File)
    }

    /// An error of the device's, with what it says about this transfer.
    pub(super) fn failed_at(&self, offset: u64, error: Error) -> Error {
        match error {
            Error::Transfer { .. } => error,
            cause => Error::Transfer { what: self.name.clone(), offset, cause: Box::new(cause) },
        }
    }
}
