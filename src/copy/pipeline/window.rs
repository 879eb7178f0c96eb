//! Copying a file from where the page cache has it: windows of it are mapped, registered, and copied without staging.
//!
//! With few threads that is faster than reading, since no thread moves the bytes: on the H200 machine 25 GB/s against 10
//! for each thread that reads; with four threads or more reading wins. Which of the two it is, depends on the machine, so
//! it is measured ([`Tuner`]): a stretch is read, the next is copied from windows, and what was faster goes on, until it
//! is time to look again.
//!
//! *A file that becomes shorter.* The CPU never touches the mapping, so there is nothing to die of. (Where the CPU makes the
//! device's copies, there are no windows. And the short rest of a file is read: drivers may have the CPU copy little.) Registering takes hold
//! of the pages that there are; a page past the end of the file is an error of that call, and the chunks are read instead,
//! which finds the end. Pages that are held stay when the file is cut off: the device then copies bytes that were the
//! file's a moment ago, and so after each chunk the file is asked for its length, before the chunk counts as arrived.
//!
//! *What is not in the page cache* would be fetched page by page by registering it. So a few places of a window are looked
//! at first, and if one of them is missing the window is read, past the cache.

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
use crate::device::memory::DeviceSlice;
use crate::error::{Error, Result};
use crate::os::file::{Cached, FileMap, map_file, read_cached};
use crate::runtime::Device;
use crate::segment::PAGE;
use crate::stream::Stream;

/// Bytes of a window, if the share has room for a few of them.
const WINDOW: usize = 64 << 20;
/// Windows that are registered at once: one is copied, one is on its way.
pub(super) const AT_ONCE: usize = 2;
/// Distance of the places that are looked at before a window is registered.
const LOOK: usize = 1 << 20;

/// Chunks below this are read.
pub(super) const LEAST_CHUNK: usize = 128 << 10;

/// Bytes of a window of a pipeline whose share and chunk are these: whole chunks. `None`: there is no room for any.
pub(super) fn window(share: usize, chunk: usize) -> Option<usize> {
    let window = (share / (2 * AT_ONCE)).min(WINDOW) / chunk * chunk;
    (window > 0).then_some(window)
}

/// A part of a file, mapped for devices.
struct Mapped(FileMap);

impl Deref for Mapped {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        // SAFETY: mapped for as long as it lives. Nobody reads through it here: it is taken for its address and length, and
        // the bytes are the device's business.
        unsafe { std::slice::from_raw_parts(self.0.base().as_ptr(), self.0.len()) }
    }
}

// SAFETY: the mapping stays where it is, wherever the value moves.
unsafe impl StableDeref for Mapped {}

/// A registered window. It counts against the pipeline's share until the last chunk of it has arrived.
pub(super) struct Window {
    mapped: Arc<Registered<Mapped>>,
    file: Arc<File>,
    name: String,
    /// The file's offset of its first byte.
    start: u64,
    /// The file's end when it was opened.
    end: u64,
    engine: Weak<Engine>,
    len: usize,
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
        Ok(Self {
            mapped: Arc::new(mapped),
            file: file.file.clone(),
            name,
            start,
            end: file.end(),
            engine,
            len,
        })
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
            engine.window_gone(self.len);
        }
    }
}

/// Bytes that are measured at a time.
const STRETCH: u64 = 256 << 20;
/// Less than this does not tell.
const LEAST: u64 = 64 << 20;
/// Bytes after which the slower way is tried again.
const AGAIN: u64 = 64 << 30;
/// By so much windows have to be faster.
const MARGIN: f64 = 1.1;

/// Finds out whether cached files are read or copied from windows.
///
/// The time in which a stretch of bytes arrived, from its first chunk to its last, tells how fast that way is here and now,
/// everything included. Where somebody paused (no chunk for a while) a stretch ends early, and is measured again if it was
/// too short to tell.
#[derive(Debug, Default)]
pub(super) struct Tuner {
    windows: bool,
    /// Of the stretch under way: when its first chunk arrived and its last so far, and the bytes after the first.
    since: Option<(Instant, Instant)>,
    bytes: u64,
    /// Bytes a second, read and from windows.
    rates: [Option<f64>; 2],
    settled: u64,
}

/// A pause in which nobody had anything to do.
const PAUSE: Duration = Duration::from_millis(250);

impl Tuner {
    /// Whether the next chunks of a cached file come from a window.
    pub(super) fn windows(&self) -> bool {
        self.windows
    }

    /// Bytes of a file that have arrived now, in this way.
    pub(super) fn arrived(&mut self, bytes: usize, by_window: bool, now: Instant) {
        if by_window != self.windows {
            return;
        }
        let (start, last) = *self.since.get_or_insert((now, now));
        let paused = now.duration_since(last) > PAUSE;
        if !paused {
            self.since = Some((start, now));
            // The first chunk has begun before the stretch.
            self.bytes += if now == start { 0 } else { bytes as u64 };
        }
        if self.bytes >= STRETCH || (paused && self.bytes >= LEAST) {
            let end = if paused { last } else { now };
            let rate = self.bytes as f64 / end.duration_since(start).as_secs_f64().max(1e-9);
            self.rates[usize::from(self.windows)] = Some(rate);
            self.settled += self.bytes;
            self.choose();
            self.restart(now);
        } else if paused {
            self.restart(now);
        }
    }

    /// A window could not be had: of this file, or (`here`) on this machine at all, by what was said.
    pub(super) fn refused(&mut self, here: bool) {
        if here {
            self.rates[1] = Some(0.0);
        }
        self.windows = false;
        self.since = None;
        self.bytes = 0;
    }

    fn restart(&mut self, now: Instant) {
        self.since = Some((now, now));
        self.bytes = 0;
    }

    fn choose(&mut self) {
        self.windows = match self.rates {
            [Some(read), Some(windows)] if self.settled < AGAIN => windows > read * MARGIN,
            [Some(_), Some(_)] => {
                self.settled = 0;
                !self.windows
            }
            [_, None] => true,
            [None, _] => false,
        };
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
            let bytes = 8 << 20;
            tuner.arrived(bytes, by_window, *now);
            *now += Duration::from_secs_f64(bytes as f64 / rates[usize::from(by_window)]);
            done += bytes as u64;
            windows += if by_window { bytes as u64 } else { 0 };
        }
        windows
    }

    #[test]
    fn the_faster_way_is_found_and_kept_and_the_other_tried_again() {
        const GIB: u64 = 1 << 30;
        let mut now = Instant::now();
        for (rates, most) in [([10e9, 24e9], true), ([40e9, 24e9], false), ([24e9, 25e9], false)] {
            let mut tuner = Tuner::default();
            let windows = run(&mut tuner, &mut now, rates, 8 * GIB);
            assert_eq!(windows > 7 * GIB, most, "{rates:?} {windows}");
            assert!(windows >= STRETCH, "both were tried");
            assert_eq!(windows < GIB, !most, "{rates:?} {windows}");
            // The machine changes: that is found out, at the price of a stretch.
            let turned = [rates[1] * 2.0, rates[0] / 2.0];
            run(&mut tuner, &mut now, if most { turned } else { [5e9, 25e9] }, 70 * GIB);
            assert_eq!(tuner.windows(), !most, "{rates:?}");
        }
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
    }

    #[test]
    fn windows_are_whole_chunks_within_the_share() {
        assert_eq!(window(256 << 20, 8 << 20), Some(64 << 20));
        assert_eq!(window(1 << 20, 64 << 10), Some(256 << 10));
        assert_eq!(window(16 << 20, 8 << 20), None);
        assert_eq!(window(1 << 30, 5 << 20), Some(60 << 20));
    }
}
