//! Staging: the segments of a plan are filled, or emptied, by the caller and by helpers of the queue's.
//!
//! One thread copies at a fraction of the link's speed, so several are at it: each takes the next segment that nobody has,
//! fills it, pushes its copies and goes on with another one, or waits for its copies and empties it. A thread has a few
//! segments on the wire and waits for its oldest before it takes one more. So a call of any length uses a bounded part of
//! the pool, and the same segments again and again, which are in the processors' caches still: memory has to bear the reading
//! of the pieces alone, or the writing: that is done past the caches, which need not read first what is overwritten.
//!
//! Where the pieces are many and short each thread plans for its own segments, so that nobody waits for a plan of the whole.
//!
//! Where the pool has no segment, helpers leave, and the caller waits: for its own segments first, then for anybody's.

use std::borrow::Cow;
use std::collections::VecDeque;
use std::marker::PhantomData;
use std::mem::MaybeUninit;
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use parking_lot::Mutex;

use super::plan::{Copy, Limits, Move, Piece, Plan, Segment};
use crate::buffer::PinnedBuf;
use crate::buffer::sealed::Lend as _;
use crate::copy::pipeline::stores::{self, Stores};
use crate::copy::queue::CopyQueue;
use crate::device::memory::DeviceSlice;
use crate::device::{DevicePtr, Transfer};
use crate::error::{Error, Result};
use crate::pool::Pool;
use crate::stream::awaited::Place;

/// Segments of a thread that are on the wire before it waits for the first of them. (With one the wire is idle while that one is
/// emptied or filled, and half of the rate is gone; with three it is no faster. Measured with 8 threads beside an H200.)
const AHEAD: usize = 2;
/// Bytes that are worth a thread: in less time than that takes it would hardly be awake.
const WORTH: usize = 2 << 20;

/// How many helpers are wanted for so many bytes.
pub(super) fn hands(bytes: usize, helpers: usize) -> usize {
    (bytes / WORTH).saturating_sub(1).min(helpers)
}

/// A call's segments, as all threads see them that are at it.
pub(super) struct Staging<'a> {
    queue: &'a CopyQueue,
    pool: &'a Pool,
    /// By pieces.
    memories: &'a [&'a DeviceSlice],
    parts: Parts<'a>,
    /// Bytes of the longest segment.
    longest: usize,
    /// The first that nobody has taken.
    next: AtomicUsize,
    outcome: Mutex<Outcome>,
}

/// What is to be done, in parts that a thread takes.
pub(super) enum Parts<'a> {
    /// Planned already.
    Segments(&'a [Segment]),
    /// Groups of an order, each to be planned by who takes it, and not longer than a segment.
    Groups {
        pieces: &'a [Piece],
        order: &'a [usize],
        groups: Vec<Range<usize>>,
        /// Bytes of a group at most.
        longest: usize,
        limits: Limits,
    },
}

impl<'a> Parts<'a> {
    fn count(&self) -> usize {
        match self {
            Self::Segments(segments) => segments.len(),
            Self::Groups { groups, .. } => groups.len(),
        }
    }

    fn longest(&self) -> usize {
        match self {
            Self::Segments(segments) => segments.iter().map(|segment| segment.len).max().unwrap_or(0),
            Self::Groups { longest, .. } => *longest,
        }
    }

    /// A part's segment.
    fn get(&self, part: usize) -> Option<Cow<'a, Segment>> {
        match self {
            Self::Segments(segments) => segments.get(part).map(Cow::Borrowed),
            Self::Groups { pieces, order, groups, limits, .. } => {
                let group = groups.get(part)?.clone();
                let mut plan = Plan::of(pieces, &order[group], *limits);
                debug_assert!(plan.segments.len() == 1 && plan.in_place.is_empty(), "a group is a segment");
                plan.segments.pop().map(Cow::Owned)
            }
        }
    }
}

/// What the threads that are done leave.
#[derive(Default)]
struct Outcome {
    places: Vec<Place>,
    error: Option<Error>,
}

/// A segment whose copies are pushed.
struct Sent<'a> {
    segment: Cow<'a, Segment>,
    buf: Arc<PinnedBuf>,
    places: Vec<Place>,
}

impl<'a> Staging<'a> {
    pub(super) fn new(
        queue: &'a CopyQueue,
        pool: &'a Pool,
        memories: &'a [&'a DeviceSlice],
        parts: Parts<'a>,
    ) -> Self {
        let longest = parts.longest();
        let (next, outcome) = (AtomicUsize::new(0), Mutex::default());
        Self { queue, pool, memories, parts, longest, next, outcome }
    }

    /// Fills all segments from the pieces' bytes, and pushes their copies. What may be under way is left, and what failed.
    pub(super) fn pack(&self, hands: usize, pieces: &[&[u8]]) -> Result<Vec<Place>> {
        let start = |segment: Cow<'a, Segment>, mut buf: PinnedBuf| {
            fill(&mut buf, &segment, pieces)?;
            self.upload(segment, buf)
        };
        // Whether one failed its own handle tells: the others happen all the same.
        let land = |sent: Sent<'_>| Ok(sent.places.into_iter().filter(|p| p.wait(None).is_err()).collect());
        self.run(hands, |helps| {
            let (mut places, left) = self.each(helps, start, land)?;
            places.extend(left.into_iter().flat_map(|sent| sent.places));
            Ok(places)
        })
    }

    /// Brings all segments from the device, and moves their bytes to the pieces' places.
    pub(super) fn unpack(&self, hands: usize, targets: &Targets<'_>) -> Result<()> {
        let land = |sent: Sent<'_>| {
            sent.places.iter().try_for_each(|place| place.wait(None))?;
            // SAFETY: landed: the copies have written each byte that is moved, and nobody writes to the segment any more.
            // Each segment is emptied once.
            unsafe { targets.fill(&sent.segment, sent.buf.as_ptr()) };
            Ok(Vec::new())
        };
        self.run(hands, |helps| {
            let (_, left) = self.each(helps, |segment, buf| self.download(segment, buf), land)?;
            left.into_iter().try_for_each(|sent| land(sent).map(drop))?;
            Ok(Vec::new())
        })
        .map(drop)
    }

    /// One thread's part, for the caller and for helpers.
    fn run(&self, hands: usize, part: impl Fn(bool) -> Result<Vec<Place>> + Sync) -> Result<Vec<Place>> {
        let part = |helps| match part(helps) {
            Ok(places) => self.outcome.lock().places.extend(places),
            Err(error) => {
                // Nobody begins another one.
                self.next.store(self.parts.count(), Ordering::Relaxed);
                self.outcome.lock().error.get_or_insert(error);
            }
        };
        self.queue.share(hands, &|| part(true), || part(false))?;
        let Outcome { places, error } = std::mem::take(&mut *self.outcome.lock());
        // With a dead device a pool says that it has nothing more to give, which is not the cause.
        error.map_or(Ok(places), |error| Err(self.queue.device().lost().unwrap_or(error)))
    }

    /// Takes segments until there are none, with no more than a few on the wire: what is left on it, and what `land` left of
    /// the others.
    fn each(
        &self,
        helps: bool,
        start: impl Fn(Cow<'a, Segment>, PinnedBuf) -> Result<Sent<'a>>,
        land: impl Fn(Sent<'a>) -> Result<Vec<Place>>,
    ) -> Result<(Vec<Place>, VecDeque<Sent<'a>>)> {
        let (mut places, mut sent) = (Vec::new(), VecDeque::new());
        // Relaxed, here and below: a number, which nothing else depends on.
        while self.next.load(Ordering::Relaxed) < self.parts.count() {
            if sent.len() >= AHEAD {
                if let Some(first) = sent.pop_front() {
                    places.extend(land(first)?);
                }
            }
            // The memory first: who has taken a segment has to see it through.
            let buf = loop {
                match self.pool.try_checkout(self.longest) {
                    Err(Error::Exhausted { .. }) => match sent.pop_front() {
                        Some(first) => places.extend(land(first)?),
                        None if helps => return Ok((places, sent)),
                        None => break self.pool.checkout(self.longest)?,
                    },
                    other => break other?,
                }
            };
            let Some(segment) = self.parts.get(self.next.fetch_add(1, Ordering::Relaxed)) else { break };
            sent.push_back(start(segment, buf)?);
        }
        Ok((places, sent))
    }

    fn upload(&self, segment: Cow<'a, Segment>, buf: PinnedBuf) -> Result<Sent<'a>> {
        let copy = |copy: &Copy| {
            let bytes = &buf[copy.at..copy.at + copy.len];
            let dst = DevicePtr(copy.device);
            (Transfer::Upload { src: bytes.as_ptr(), dst, len: copy.len }, self.memories[copy.piece])
        };
        let copies: Vec<_> = segment.copies.iter().map(copy).collect();
        self.send(segment, buf, &copies)
    }

    fn download(&self, segment: Cow<'a, Segment>, buf: PinnedBuf) -> Result<Sent<'a>> {
        let copy = |copy: &Copy| {
            // SAFETY: within the segment.
            let dst = unsafe { buf.as_ptr().cast_mut().add(copy.at) };
            let src = DevicePtr(copy.device);
            (Transfer::Download { src, dst, len: copy.len }, self.memories[copy.piece])
        };
        let copies: Vec<_> = segment.copies.iter().map(copy).collect();
        self.send(segment, buf, &copies)
    }

    /// Pushes a segment's copies. From here on nobody but the device touches it before they are done: the buffer is ours
    /// alone, as each of its shares is.
    fn send(
        &self,
        segment: Cow<'a, Segment>,
        buf: PinnedBuf,
        copies: &[(Transfer, &DeviceSlice)],
    ) -> Result<Sent<'a>> {
        let buf = Arc::new(buf);
        let places = self.queue.push_all(copies, || buf.lend())?;
        Ok(Sent { segment, buf, places })
    }
}

/// Makes a segment's moves. What lies between them is zero.
fn fill(buf: &mut PinnedBuf, segment: &Segment, pieces: &[&[u8]]) -> Result<()> {
    let bytes = |step: &Move| &pieces[step.piece][step.from..step.from + step.len];
    for (n, step) in segment.moves.iter().enumerate() {
        if let Some(next) = segment.moves.get(n + 1) {
            announce(bytes(next));
        }
        buf.try_resize(step.at, 0)?;
        buf.try_extend_from_slice(bytes(step))?;
    }
    Ok(())
}

/// Has the processor fetch the beginnings of the pages of a piece that is copied next: it goes on by itself within a page, and
/// stops at each page's end.
fn announce(bytes: &[u8]) {
    #[cfg(target_arch = "x86_64")]
    for page in bytes.chunks(PAGE) {
        for line in 0..LINES {
            // SAFETY: SSE is a part of x86_64; a prefetch reads nothing, wherever it points.
            unsafe {
                std::arch::x86_64::_mm_prefetch::<{ std::arch::x86_64::_MM_HINT_T0 }>(
                    page.as_ptr().wrapping_add(line * 64).cast(),
                );
            }
        }
    }
    let _ = bytes;
}

/// What the processor fetches ahead within, and the lines of it that set it going.
#[cfg(target_arch = "x86_64")]
const PAGE: usize = 4096;
#[cfg(target_arch = "x86_64")]
const LINES: usize = 4;

/// Where the pieces of a scatter go: borrowed memory, no byte of which is in two of them.
pub(super) struct Targets<'a> {
    places: Vec<(*mut u8, usize)>,
    borrowed: PhantomData<&'a mut [u8]>,
}

// SAFETY: who fills them says that nobody else does so with the same segment, and by the plan each byte is in one.
unsafe impl Sync for Targets<'_> {}

impl<'a> Targets<'a> {
    pub(super) fn new(targets: impl Iterator<Item = &'a mut [u8]>) -> Self {
        let places = targets.map(|target| (target.as_mut_ptr(), target.len())).collect();
        Self { places, borrowed: PhantomData }
    }

    /// The same for places by their first bytes and lengths.
    ///
    /// # Safety
    /// They are valid for writes, and nobody else's, for as long as this is there.
    pub(super) unsafe fn at(places: Vec<(*mut u8, usize)>) -> Self {
        Self { places, borrowed: PhantomData }
    }

    /// Moves a segment's bytes to their places.
    ///
    /// # Safety
    /// From `from` on there are the bytes of all the segment's moves, which nobody writes; and no other thread fills the
    /// same segment. The plan is one of these targets.
    unsafe fn fill(&self, segment: &Segment, from: *const u8) {
        for step in &segment.moves {
            let (target, len) = self.places[step.piece];
            debug_assert!(step.from + step.len <= len, "a move leaves its piece");
            // SAFETY: within the segment, by the caller's word, and within the target, by the plan; the target is borrowed
            // exclusively, and no other move has the same bytes.
            let (from, to) = unsafe {
                (
                    std::slice::from_raw_parts(from.add(step.at), step.len),
                    std::slice::from_raw_parts_mut(target.add(step.from).cast::<MaybeUninit<u8>>(), step.len),
                )
            };
            // Not read first: with eight threads memory is the limit, and a quarter of the rate is gained.
            stores::copy(from, to, Stores::Streaming);
        }
    }
}
