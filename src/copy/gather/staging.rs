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
use std::mem::MaybeUninit;
use std::sync::Arc;

use crate::locks::Mutex;

use super::plan::{self, Copy, Limits, Move, Piece, Plan, Segment};
use super::survey::{Pieces, Survey};
use super::{FIRST, SLACK};
use crate::buffer::PinnedBuf;
use crate::buffer::sealed::Lend as _;
use crate::copy::pipeline::stores::{self, Stores};
use crate::copy::queue::{CopyQueue, may_wait};
use crate::device::memory::DeviceSlice;
use crate::device::{DevicePtr, Transfer};
use crate::error::{Error, Result};
use crate::pool::Pool;
use crate::sealed::KEY;
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
    pieces: &'a dyn Pieces,
    parts: Parts<'a>,
    outcome: Mutex<Outcome>,
}

/// What is to be done, in parts that a thread takes: each is a segment.
pub(super) struct Parts<'a> {
    from: From<'a>,
    /// Bytes of the longest segment.
    longest: usize,
    /// The next segment, or piece of the order, that nobody has taken; and the bytes of those before.
    next: Mutex<(usize, usize)>,
    /// For the calling thread's first segment, if there is one.
    first: Mutex<Option<PinnedBuf>>,
}

enum From<'a> {
    /// Planned already.
    Segments(&'a [Segment]),
    /// Pieces in their order, or in another one, cut off and planned by who takes them.
    Pieces { pieces: &'a dyn Pieces, order: Option<Vec<usize>>, bytes: usize, threads: usize, limits: Limits },
}

impl<'a> Parts<'a> {
    pub(super) fn planned(segments: &'a [Segment]) -> Self {
        let longest = segments.iter().map(|segment| segment.len).max().unwrap_or(0);
        Self { from: From::Segments(segments), longest, next: Mutex::default(), first: Mutex::default() }
    }

    /// For so many threads. None of the pieces is longer than a segment.
    pub(super) fn cut(
        pieces: &'a dyn Pieces,
        survey: &Survey,
        order: Option<Vec<usize>>,
        limits: Limits,
        threads: usize,
    ) -> Self {
        let Survey { bytes, count, .. } = *survey;
        let longest = bytes.saturating_add(count.saturating_mul(SLACK)).min(limits.segment);
        let from = From::Pieces { pieces, order, bytes, threads, limits };
        Self { from, longest, next: Mutex::default(), first: Mutex::default() }
    }

    /// Bytes of the longest segment.
    pub(super) fn longest(&self) -> usize {
        self.longest
    }

    /// With a buffer for the calling thread's first segment: where the pieces themselves may be all that the pool has, nobody is
    /// to find that out when it is too late.
    pub(super) fn with(self, first: PinnedBuf) -> Self {
        *self.first.lock() = Some(first);
        self
    }

    /// Whether each piece is in one segment.
    pub(super) fn are_cut(&self) -> bool {
        matches!(self.from, From::Pieces { .. })
    }

    fn count(&self) -> usize {
        match &self.from {
            From::Segments(segments) => segments.len(),
            From::Pieces { pieces, order, .. } => order.as_ref().map_or_else(|| pieces.count(), Vec::len),
        }
    }

    fn is_left(&self) -> bool {
        let (next, before) = *self.next.lock();
        // What has no bytes is not worth a segment.
        let has_bytes = match &self.from {
            From::Segments(_) => true,
            From::Pieces { bytes, .. } => before < *bytes,
        };
        has_bytes && next < self.count()
    }

    /// Nobody takes one any more.
    fn stop(&self) {
        self.next.lock().0 = usize::MAX;
    }

    /// The next segment.
    fn take(&self) -> Option<Cow<'a, Segment>> {
        let (limits, group) = match &self.from {
            From::Segments(segments) => {
                let mut next = self.next.lock();
                let segment = segments.get(next.0).map(Cow::Borrowed);
                next.0 = next.0.saturating_add(1);
                return segment;
            }
            From::Pieces { pieces, order, bytes, threads, limits } => {
                let mut next = self.next.lock();
                let (from, before) = *next;
                let names = (from..self.count()).map(|n| order.as_ref().map_or(n, |order| order[n]));
                let named = names.map(|i| (i, pieces.get(i, false)));
                let (group, count) = plan::group(named, segment_of(*bytes, before, *threads, limits.segment));
                next.0 = from.saturating_add(count);
                next.1 = group.iter().fold(before, |sum, (_, piece)| sum.saturating_add(piece.len));
                (limits, group)
            }
        };
        let (names, group): (Vec<usize>, Vec<Piece>) = group.into_iter().unzip();
        let all: Vec<usize> = (0..group.len()).collect();
        let mut plan = Plan::of(&group, &all, *limits);
        debug_assert!(plan.segments.len() <= 1 && plan.in_place.is_empty(), "a group is a segment");
        let mut segment = plan.segments.pop()?;
        // By the names that the call has for them.
        segment.moves.iter_mut().for_each(|step| step.piece = names[step.piece]);
        segment.copies.iter_mut().for_each(|copy| copy.piece = names[copy.piece]);
        Some(Cow::Owned(segment))
    }
}

/// Bytes of the next segment at most, with so many of a call's before it: round by round twice as long, and at the end half of
/// what is left for each thread.
fn segment_of(bytes: usize, before: usize, threads: usize, most: usize) -> usize {
    if threads < 2 {
        return most;
    }
    let left = bytes.saturating_sub(before);
    (FIRST + before / threads).min((left / threads / 2).max(FIRST)).min(most)
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
        pieces: &'a dyn Pieces,
        parts: Parts<'a>,
    ) -> Self {
        Self { queue, pool, pieces, parts, outcome: Mutex::default() }
    }

    /// Fills all segments from the pieces' bytes, and pushes their copies. What may be under way is left, and what failed.
    pub(super) fn pack<'b>(
        &self,
        hands: usize,
        bytes: &(dyn Fn(usize) -> &'b [u8] + Sync),
    ) -> Result<Vec<Place>> {
        let start = |segment: Cow<'a, Segment>, mut buf: PinnedBuf| {
            fill(&mut buf, &segment, bytes)?;
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
            unsafe { targets.fill(&sent.segment, sent.buf.as_ptr())? };
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
                self.parts.stop();
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
        while self.parts.is_left() {
            if sent.len() >= AHEAD {
                if let Some(first) = sent.pop_front() {
                    places.extend(land(first)?);
                }
            }
            // The memory first: who has taken a segment has to see it through.
            let kept = if helps { None } else { self.parts.first.lock().take() };
            let buf = if let Some(buf) = kept {
                buf
            } else {
                loop {
                    match self.pool.try_checkout(self.parts.longest) {
                        Err(Error::Exhausted { .. }) => match sent.pop_front() {
                            Some(first) => {
                                let buf = first.buf.clone();
                                places.extend(land(first)?);
                                // The caller's own again: others may wait for whatever goes back, and for this call as well.
                                if let Some(mut buf) = (!helps && may_wait()).then(|| alone(buf)).flatten() {
                                    buf.clear();
                                    break buf;
                                }
                            }
                            None if helps => return Ok((places, sent)),
                            None if !may_wait() => break self.pool.try_checkout(self.parts.longest)?,
                            None => break self.pool.checkout(self.parts.longest)?,
                        },
                        other => break other?,
                    }
                }
            };
            let Some(segment) = self.parts.take() else { break };
            sent.push_back(start(segment, buf)?);
        }
        Ok((places, sent))
    }

    fn upload(&self, segment: Cow<'a, Segment>, buf: PinnedBuf) -> Result<Sent<'a>> {
        let copy = |copy: &Copy| {
            let bytes = &buf[copy.at..copy.at + copy.len];
            let dst = DevicePtr(copy.device);
            (Transfer::Upload { src: bytes.as_ptr(), dst, len: copy.len }, self.pieces.memory(copy.piece))
        };
        let copies: Vec<_> = segment.copies.iter().map(copy).collect();
        self.send(segment, buf, &copies)
    }

    fn download(&self, segment: Cow<'a, Segment>, buf: PinnedBuf) -> Result<Sent<'a>> {
        let copy = |copy: &Copy| {
            // SAFETY: within the segment.
            let dst = unsafe { buf.as_ptr().cast_mut().add(copy.at) };
            let src = DevicePtr(copy.device);
            (Transfer::Download { src, dst, len: copy.len }, self.pieces.memory(copy.piece))
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
        let places = self.queue.push_all(copies, || buf.lend(KEY))?;
        Ok(Sent { segment, buf, places })
    }
}

/// A buffer whose copies are done, once the queue has let go of it: it does so right after it says that. `None`: it keeps it,
/// since the device was lost.
fn alone(mut buf: Arc<PinnedBuf>) -> Option<PinnedBuf> {
    for _ in 0..1000 {
        match Arc::try_unwrap(buf) {
            Ok(buf) => return Some(buf),
            Err(shared) => buf = shared,
        }
        std::thread::yield_now();
    }
    None
}

/// Makes a segment's moves. What lies between them is zero.
fn fill<'a>(
    buf: &mut PinnedBuf,
    segment: &Segment,
    pieces: &(dyn Fn(usize) -> &'a [u8] + Sync),
) -> Result<()> {
    let bytes = |step: &Move| {
        let all = pieces(step.piece);
        // (A value of the caller's own may be shorter each time it is asked.)
        let end = step.from + step.len;
        all.get(step.from..end).ok_or(Error::OutOfRange { start: step.from, end, len: all.len() })
    };
    // Found out for all at first: these looks, at what is in no cache, do not wait for each other.
    let all = segment.moves.iter().map(bytes).collect::<Result<Vec<&[u8]>>>()?;
    for (n, step) in segment.moves.iter().enumerate() {
        all.get(n + 1).copied().into_iter().for_each(announce);
        buf.try_resize(step.at, 0)?;
        buf.try_extend_from_slice(all[n])?;
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

/// Where a piece of a scatter goes.
#[derive(Clone, Copy, Debug)]
pub(super) struct Target {
    pub(super) at: *mut u8,
    /// Bytes that may be written there.
    pub(super) len: usize,
}

impl Target {
    pub(super) fn of(bytes: &mut [u8]) -> Self {
        Self { at: bytes.as_mut_ptr(), len: bytes.len() }
    }
}

// SAFETY: an address, which means the same on every thread; who writes there says why it may.
unsafe impl Send for Target {}
// SAFETY: as above.
unsafe impl Sync for Target {}

/// Where the pieces of a scatter go, no byte of which is in two of them.
pub(super) struct Targets<'a> {
    place: &'a (dyn Fn(usize) -> Result<Target> + Sync),
}

impl<'a> Targets<'a> {
    /// # Safety
    /// What `place` names is valid for writes, and nobody else's, for as long as this is there.
    pub(super) unsafe fn new(place: &'a (dyn Fn(usize) -> Result<Target> + Sync)) -> Self {
        Self { place }
    }

    /// Moves a segment's bytes to their places.
    ///
    /// # Safety
    /// From `from` on there are the bytes of all the segment's moves, which nobody writes; and no other thread fills the
    /// same segment. The plan is one of these targets.
    unsafe fn fill(&self, segment: &Segment, from: *const u8) -> Result<()> {
        // Found out for all at first, as for what is packed.
        let places = segment.moves.iter().map(|step| (self.place)(step.piece)).collect::<Result<Vec<_>>>()?;
        for (step, Target { at, len }) in segment.moves.iter().zip(places) {
            if step.from + step.len > len {
                return Err(Error::TooSmall { need: step.from + step.len, have: len });
            }
            // SAFETY: within the segment, by the caller's word, and within the target; that is nobody else's, by the word of who
            // made this, and no other move has the same bytes.
            let (from, to) = unsafe {
                (
                    std::slice::from_raw_parts(from.add(step.at), step.len),
                    std::slice::from_raw_parts_mut(at.add(step.from).cast::<MaybeUninit<u8>>(), step.len),
                )
            };
            // Not read first: with eight threads memory is the limit, and a quarter of the rate is gained.
            stores::copy(from, to, Stores::Streaming);
        }
        Ok(())
    }
}
