//! Copying a file from where the page cache has it: windows of it are mapped, registered, and copied without staging.
//!
//! No thread moves the bytes, so with one thread or two that is faster than reading: on the H200 machine up to 0.53 of
//! the link, against 0.15 for each thread that reads; with four threads or more reading wins. Which of the two it is,
//! depends on the machine, so it is measured ([`Tuner`]): a stretch is read, the next is copied from windows, and what
//! was faster goes on, until it is time to look again.
//!
//! *In batches.* While one thread registers, the submissions of all others wait in the driver, for 1.5 ms on average;
//! and unregistering waits for every copy that is under way in the context (18 ms beside one of 1 GiB; seen on driver
//! 580). Reading beside it is therefore slower than either alone. So windows are registered one after the other, the
//! copies of one beside the registering of the next, up to the pipeline's share; when all of them have arrived and
//! there is room for no more, they are unregistered together, beside an empty wire. And since all of that holds up
//! other people's copies, there are no windows while foreground transfers are about, or other bulk transfers than those
//! of files.
//!
//! *A file that becomes shorter.* The CPU never touches the mapping, so there is nothing to die of. (Where the CPU
//! makes the device's copies, there are no windows. And the short rest of a file is read: drivers may have the CPU copy
//! little.) Registering takes hold of the pages that there are; a page past the end of the file is an error of that
//! call, and the chunks are read instead, which finds the end. Pages that are held stay when the file is cut off: the
//! device then copies bytes that were the file's a moment ago, and so after each chunk the file is asked for its
//! length, before the chunk counts as arrived.
//!
//! *What is not in the page cache* would be fetched page by page by registering it. So a few places of a window are
//! looked at first, and if one of them is missing the window is read, past the cache.

use std::fs::File;
use std::mem::MaybeUninit;
use std::ops::Deref;
use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};

use stable_deref_trait::StableDeref;

use super::engine::Engine;
use super::file::FileSource;
use super::stats::Counters;
use super::wire::{Arrives, InPlace};
use crate::buffer::Registered;
use crate::device::handle::Device;
use crate::device::memory::DeviceSlice;
use crate::error::{Error, Result};
use crate::os::file::{Cached, FileMap, map_file, read_cached};
use crate::segment::PAGE;
use crate::stream::Stream;

/// Bytes of a window, if the share has room for a few of them.
const WINDOW: usize = 64 << 20;
/// Windows of a batch.
const BATCH: usize = 4;
/// No window is registered so soon after somebody was in a hurry.
pub(super) const LULL: Duration = Duration::from_millis(100);
/// Distance of the places that are looked at before a window is registered.
const LOOK: usize = 1 << 20;

/// Chunks below this are read.
pub(super) const LEAST_CHUNK: usize = 128 << 10;

/// Bytes of a window of a pipeline whose share and chunk are these: whole chunks. `None`: there is no room for any.
pub(super) fn window(share: usize, chunk: usize) -> Option<usize> {
    let window = (share / BATCH).min(WINDOW) / chunk * chunk;
    (window > 0).then_some(window)
}

/// A part of a file, mapped for devices.
struct Mapped(FileMap);

impl Deref for Mapped {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        // SAFETY: mapped for as long as it lives. Nobody reads through it here: it is taken for its address and length,
        // and the bytes are the device's business.
        unsafe { std::slice::from_raw_parts(self.0.base().as_ptr(), self.0.len()) }
    }
}

// SAFETY: the mapping stays where it is, wherever the value moves.
unsafe impl StableDeref for Mapped {}

/// The windows of a pipeline, and whether there are to be any.
#[derive(Default)]
pub(super) struct Windows {
    /// Bytes of all that are registered or about to be, which count against the share like segments.
    pub(super) bytes: usize,
    /// Of these, in batches that are being dropped.
    going: usize,
    /// Those being registered, and those that have not arrived.
    pub(super) open: usize,
    /// One is being registered.
    pub(super) registering: bool,
    /// Those that have arrived: the rest of the batch.
    arrived: Vec<Arc<Registered<Mapped>>>,
    pub(super) tuner: Tuner,
    /// When the foreground was last heard of.
    pub(super) hurry: Option<Instant>,
}

impl Windows {
    /// The whole batch, if all of it has arrived and none is coming: dropping it, which is not to be done under a lock,
    /// has the device's worker thread unregister it before that registers anything else. With its bytes, which count
    /// until it was dropped ([`released`](Self::released)).
    pub(super) fn batch(&mut self) -> Option<(impl Sized + use<>, usize)> {
        if self.open > 0 || self.arrived.is_empty() {
            return None;
        }
        let bytes = self.bytes - self.going;
        self.going += bytes;
        Some((std::mem::take(&mut self.arrived), bytes))
    }

    /// A batch of so many bytes was dropped.
    pub(super) fn released(&mut self, bytes: usize) {
        self.going -= bytes;
        self.bytes -= bytes;
    }

    /// One has arrived, or will not.
    fn close(&mut self, mapped: Arc<Registered<Mapped>>) {
        self.open -= 1;
        self.arrived.push(mapped);
    }
}

/// A registered window, of which some chunk has not arrived.
pub(super) struct Window {
    mapped: Arc<Registered<Mapped>>,
    file: Arc<File>,
    name: String,
    /// The file's offset of its first byte.
    start: u64,
    /// The file's end when it was opened.
    end: u64,
    engine: Weak<Engine>,
}

impl Window {
    /// Maps and registers a range of a file, which the engine has counted already, as `len` bytes.
    ///
    /// # Errors
    /// Why it was not registered: it is to be read.
    pub(super) fn open(
        engine: &Arc<Engine>,
        file: &FileSource,
        at: u64,
        len: usize,
    ) -> Result<Self, Option<Error>> {
        let file_end = file.file.metadata().map_err(|_| None)?.len();
        if file_end < at + len as u64 || !is_cached(&file.file, at, len) {
            return Err(None);
        }
        let start = at - at % crate::os::page_size() as u64;
        let whole = (at - start) as usize + len;
        let map = map_file(&file.file, start, whole).map_err(Some)?;
        let mapped = register(&engine.device, map).map_err(Some)?;
        let (name, engine) = (file.name().to_owned(), Arc::downgrade(engine));
        Ok(Self { mapped: Arc::new(mapped), file: file.file.clone(), name, start, end: file.end(), engine })
    }

    /// Where in it the file's byte at this offset is.
    pub(super) fn offset(&self, at: u64) -> usize {
        (at - self.start) as usize
    }
}

fn register(device: &Device, map: FileMap) -> Result<Registered<Mapped>> {
    device.register_read_only(Mapped(map)).map_err(|refused| refused.error)
}

/// Whether the page cache has a range, as far as a few of its pages tell.
fn is_cached(file: &File, at: u64, len: usize) -> bool {
    let mut byte = [MaybeUninit::uninit(); 1];
    (0..len)
        .step_by(LOOK)
        .chain([len - 1])
        .all(|place| matches!(read_cached(file, &mut byte, at + place as u64), Ok(Cached::Read(1))))
}

impl InPlace for Window {
    fn submit(&self, stream: &Stream, start: usize, to: &DeviceSlice) -> Result<Box<dyn Arrives>> {
        let flight = stream.upload_part(self.mapped.clone(), start..start + to.len(), to)?;
        Ok(Box::new(flight))
    }

    fn arrived(&self, start: usize, len: usize) -> Result<()> {
        let (from, until) = (self.start + start as u64, self.start + (start + len) as u64);
        let now = self.file.metadata().map_err(|e| super::workers::read_error(&self.name, from, &e))?.len();
        if now < until {
            return Err(Error::Shrunk { what: self.name.clone(), end: now, len: self.end });
        }
        if let Some(engine) = self.engine.upgrade() {
            Counters::add(&engine.counters.windows, len);
        }
        Ok(())
    }
}

impl Drop for Window {
    fn drop(&mut self) {
        if let Some(engine) = self.engine.upgrade() {
            engine.window_gone(|windows| windows.close(self.mapped.clone()));
        }
    }
}

/// Bytes that are measured at a time.
const STRETCH: u64 = 256 << 20;
/// Less than this does not tell.
const LEAST: u64 = 64 << 20;
/// Bytes after which the slower way is tried again: one stretch in as many costs less than a hundredth.
const AGAIN: u64 = 64 << 30;
/// The same where windows were found to be faster: reading may have been slow for a moment, when threads and segments
/// were new. Four times as many each time that it is confirmed.
const SOON: u64 = 2 << 30;
/// Bytes that are enough to try a way again.
const TRIAL: u64 = STRETCH / 4;
/// Of the arrivals of a stretch, one in so many may leave the wire with nothing to do, and reading is as good as it
/// gets.
const IDLE: u32 = 4;
/// By so much windows may still become faster after the first, which nothing else was registered beside.
const HOPE: f64 = 2.0;
/// By so much windows have to be faster: they are in everybody's way, and unregistering the last batch of a stretch is
/// not a part of it.
const MARGIN: f64 = 1.25;

/// Finds out whether cached files are read or copied from windows.
///
/// The time from when somebody began with the first bytes of a stretch (for windows: before the first was registered)
/// until the last of them arrived tells how fast that way is here and now. Where somebody paused (nothing begins or
/// arrives for a while) a stretch ends early, and is measured again if it was too short to tell. Windows are not even
/// tried where reading keeps the wire busy, for a trial costs as much as reading some hundred megabytes: what is
/// registered holds up everybody. And their first stretch ends with the first window if that was so slow that the next
/// ones will not make up for it.
#[derive(Debug, Default)]
pub(super) struct Tuner {
    /// What is done now, and what was found to be faster.
    windows: bool,
    prefers: bool,
    /// Of the stretch under way: when it began, and when something of it was last heard of.
    since: Option<(Instant, Instant)>,
    bytes: u64,
    /// Bytes a second, read and from windows.
    rates: [Option<f64>; 2],
    /// Arrivals of the stretch, and those after which the wire had nothing to do.
    arrivals: u32,
    idle: u32,
    /// Since the other way was tried, and how many until it is tried again.
    settled: u64,
    again: u64,
}

/// A pause in which nobody had anything to do.
const PAUSE: Duration = Duration::from_millis(250);

impl Tuner {
    /// Whether the next chunks of a cached file come from a window.
    pub(super) fn windows(&self) -> bool {
        self.windows
    }

    /// Somebody begins to read a chunk of a file, or to register a window of one.
    pub(super) fn begins(&mut self, by_window: bool, now: Instant) {
        if by_window != self.windows {
            return;
        }
        let (start, last) = *self.since.get_or_insert((now, now));
        if now.duration_since(last) <= PAUSE {
            self.since = Some((start, now));
            return;
        }
        if self.bytes >= LEAST {
            self.settle(start, last);
        }
        (self.bytes, self.arrivals, self.idle) = (0, 0, 0);
        self.since = (by_window == self.windows).then_some((now, now));
    }

    /// Bytes of a file that have arrived now, in this way, and whether they have left the wire with nothing to do.
    pub(super) fn arrived(&mut self, bytes: usize, by_window: bool, idle: bool, now: Instant) {
        let Some((start, _)) = self.since.filter(|_| by_window == self.windows) else { return };
        self.since = Some((start, now));
        self.bytes += bytes as u64;
        self.arrivals += 1;
        self.idle += u32::from(idle);
        let trial = self.windows != self.prefers || self.rates[usize::from(by_window)].is_none();
        let rate = self.bytes as f64 / now.duration_since(start).as_secs_f64().max(1e-9);
        let hopeless = by_window && self.rates[0].is_some_and(|read| rate * HOPE < read * MARGIN);
        let again = self.rates[usize::from(by_window)].is_some();
        let enough = if trial && (hopeless || again) { TRIAL } else { STRETCH };
        if self.bytes >= enough {
            self.settle(start, now);
            self.bytes = 0;
            // What follows in the same way has begun already.
            self.since = (by_window == self.windows).then_some((now, now));
        }
    }

    /// A window could not be had: of this file, or (`here`) on this machine at all, by what was said.
    pub(super) fn refused(&mut self, here: bool) {
        if here {
            self.rates[1] = Some(0.0);
        }
        (self.windows, self.prefers) = (false, false);
        self.since = None;
        (self.bytes, self.arrivals, self.idle) = (0, 0, 0);
    }

    /// A stretch is over.
    fn settle(&mut self, start: Instant, end: Instant) {
        let rate = self.bytes as f64 / end.duration_since(start).as_secs_f64().max(1e-9);
        self.rates[usize::from(self.windows)] = Some(rate);
        let busy = !self.windows && self.idle * IDLE < self.arrivals;
        (self.arrivals, self.idle) = (0, 0);
        let [Some(read), Some(windows)] = self.rates else {
            // The other way has to be tried first, unless there is nothing to be gained.
            self.windows = !self.windows && !busy;
            return;
        };
        let (trial, better) = (self.windows != self.prefers, windows > read * MARGIN);
        let first = if better { SOON } else { AGAIN };
        if better != self.prefers || self.again == 0 {
            (self.settled, self.again) = (0, first);
        } else if trial {
            (self.settled, self.again) = (0, (self.again * 4).clamp(first, AGAIN));
        }
        self.prefers = better;
        self.windows = better;
        self.settled += self.bytes;
        if self.settled >= self.again {
            self.windows = !better && !busy;
        }
    }
}

/// Windows start on chunks, and chunks on pages but for the first.
const _: () = assert!(WINDOW % PAGE == 0);

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    /// Brings bytes at a rate (bytes a second, read and from windows) until `total` were begun; how many from windows.
    fn run(tuner: &mut Tuner, now: &mut Instant, rates: [f64; 2], total: u64) -> u64 {
        let (mut done, mut windows) = (0, 0);
        while done < total {
            let by_window = tuner.windows();
            // A window of several chunks takes its time before the first of them arrives.
            let bytes = if by_window { 64 << 20 } else { 4 << 20 };
            tuner.begins(by_window, *now);
            *now += Duration::from_secs_f64(bytes as f64 / rates[usize::from(by_window)]);
            for _ in 0..bytes / (4 << 20) {
                tuner.arrived(4 << 20, by_window, true, *now);
            }
            done += bytes;
            windows += if by_window { bytes } else { 0 };
        }
        windows
    }

    #[test]
    fn the_faster_way_is_found_and_kept_and_the_other_tried_again() {
        const GIB: u64 = 1 << 30;
        let mut now = Instant::now();
        for (rates, most) in [([10e9, 24e9], true), ([40e9, 24e9], false), ([24e9, 29e9], false)] {
            let mut tuner = Tuner::default();
            let windows = run(&mut tuner, &mut now, rates, 8 * GIB);
            assert_eq!(windows > 7 * GIB, most, "{rates:?} {windows}");
            assert!(windows >= TRIAL, "both were tried");
            assert_eq!(windows < GIB, !most, "{rates:?} {windows}");
            // The machine changes: that is found out, at the price of a stretch.
            let turned = [rates[1] * 2.0, rates[0] / 2.0];
            run(&mut tuner, &mut now, if most { turned } else { [5e9, 25e9] }, 70 * GIB);
            assert_eq!(tuner.windows(), !most, "{rates:?}");
        }
    }

    #[test]
    fn a_slow_start_of_reading_is_found_out_soon() {
        let (mut now, mut tuner) = (Instant::now(), Tuner::default());
        run(&mut tuner, &mut now, [10e9, 25e9], STRETCH);
        let windows = run(&mut tuner, &mut now, [50e9, 25e9], 16 << 30);
        assert!(!tuner.windows() && windows <= SOON + STRETCH, "{windows} {tuner:?}");
        // And where windows are faster in truth, reading is tried seldom.
        let mut tuner = Tuner::default();
        let windows = run(&mut tuner, &mut now, [8e9, 25e9], 100 << 30);
        assert!(windows >= (99 << 30), "{windows} {tuner:?}");
    }

    #[test]
    fn where_reading_keeps_the_wire_busy_windows_are_not_tried() {
        let (now, mut tuner) = (Instant::now(), Tuner::default());
        let mut chunks = 0;
        let mut read = |tuner: &mut Tuner, one_in: u64| {
            for chunk in 0..1000 {
                chunks += 1;
                let at = now + Duration::from_micros(80 * chunks);
                tuner.begins(false, at);
                tuner.arrived(4 << 20, false, chunk % one_in == 0, at);
                if tuner.windows() {
                    return;
                }
            }
        };
        read(&mut tuner, 5);
        assert!(!tuner.windows() && tuner.rates[0].is_some() && tuner.rates[1].is_none(), "{tuner:?}");
        read(&mut tuner, 3);
        assert!(tuner.windows(), "{tuner:?}");
    }

    #[test]
    fn many_threads_lose_one_window_and_no_more() {
        let (mut now, mut tuner) = (Instant::now(), Tuner::default());
        let windows = run(&mut tuner, &mut now, [50e9, 20e9], 60 << 30);
        assert_eq!(windows, WINDOW as u64, "{tuner:?}");
    }

    #[test]
    fn a_pause_is_no_slowness() {
        let mut now = Instant::now();
        let mut tuner = Tuner::default();
        for _ in 0..100 {
            run(&mut tuner, &mut now, [40e9, 20e9], 56 << 20);
            now += Duration::from_secs(1);
        }
        assert!(!tuner.windows() && tuner.rates == [None, None], "{tuner:?}");
        run(&mut tuner, &mut now, [40e9, 20e9], 2 << 30);
        assert!(!tuner.windows() && tuner.rates[0].is_some_and(|rate| rate > 35e9), "{tuner:?}");
        assert!(tuner.rates[1].is_some_and(|rate| rate > 19e9), "{tuner:?}");
    }

    #[test]
    fn registering_the_first_window_of_a_stretch_is_a_part_of_it() {
        let (mut now, mut tuner) = (Instant::now(), Tuner::default());
        run(&mut tuner, &mut now, [30e9, 1e9], STRETCH);
        assert!(tuner.windows(), "{tuner:?}");
        // 100 ms of registering, then all arrives at once.
        tuner.begins(true, now);
        tuner.arrived(STRETCH as usize, true, true, now + Duration::from_millis(100));
        assert!(!tuner.windows() && tuner.rates[1].is_some_and(|rate| rate < 3e9), "{tuner:?}");
    }

    #[test]
    fn a_batch_goes_when_all_of_it_has_arrived() {
        let mut windows = Windows { bytes: 5, open: 1, ..Windows::default() };
        assert!(windows.batch().is_none(), "one is under way");
        windows.open = 0;
        assert!(windows.batch().is_none(), "there is none");
    }

    #[test]
    fn windows_are_whole_chunks_within_the_share() {
        assert_eq!(window(256 << 20, 8 << 20), Some(64 << 20));
        assert_eq!(window(1 << 20, 64 << 10), Some(256 << 10));
        assert_eq!(window(16 << 20, 8 << 20), None);
        assert_eq!(window(16 << 20, 4 << 20), Some(4 << 20));
        assert_eq!(window(1 << 30, 5 << 20), Some(60 << 20));
    }
}
