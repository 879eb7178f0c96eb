//! The segment rule and the arena: any length, any alignment, any shape of regions.
//!
//! First the rule by itself, for lengths up to the end of the address space, against a naive form of the same rule (a
//! linear search for the first class that is large enough). Then a pool on a simulated GPU, through any sequence of
//! checkouts, returns and trims; the input chooses its capacity, regions, extents and caches. Segments must have the
//! positions and lengths of the rule and must not overlap, and [`Pool::check`] must find nothing. At the end everything
//! is returned, and then the memory must serve any request that is not too long for the pool.
#![no_main]

use std::sync::LazyLock;

use arbitrary::Arbitrary;
use libfuzzer_sys::fuzz_target;
use pinpool::{Error, PinnedBuf, Pool, Request, Unpinned};

use segment::{CLASSES, Class, LARGEST_CLASS_LEN, MAX_ALIGN, PAGE, Placement, SEGMENT_ALIGN};

#[path = "../../tests/support/hand.rs"]
#[allow(dead_code)]
mod hand;

/// The crate's own file, which is not part of its public interface.
#[path = "../../src/segment.rs"]
#[allow(dead_code, unexpected_cfgs)]
mod segment;

/// The part of the crate that the file uses.
mod error {
    pub use pinpool::{Error, Result};
}

/// The most steps of one input.
const STEPS: usize = 96;
/// The most pages of a pool.
const PAGES: usize = 1024;

#[derive(Arbitrary, Debug, Clone, Copy)]
struct Shape {
    pages: u16,
    extent: u16,
    region: u16,
    initial: u16,
    cache: u16,
}

#[derive(Arbitrary, Debug, Clone, Copy)]
enum Step {
    Take { len: u32, shift: u8, align: u8 },
    TakeTwo { len: [u16; 2] },
    Give { at: u8 },
    GiveFrom { at: u8 },
    Trim { keep: u16 },
}

#[derive(Arbitrary, Debug)]
struct Input {
    lens: [u64; 2],
    align: u64,
    align_shift: u8,
    shape: Shape,
    steps: Vec<Step>,
    last: u32,
}

/// The rule, by a linear search.
fn rule(len: usize, align: usize) {
    let placement = Placement::of(len, align);
    if !align.is_power_of_two() || align > MAX_ALIGN {
        assert!(matches!(placement, Err(Error::Argument(text)) if text.contains("no alignment")));
        return;
    }
    if len == 0 {
        assert_eq!(placement, Err(Error::ZeroLength));
        assert_eq!(Class::of(len), None);
        return;
    }
    let need = (len as u128).next_multiple_of(32) + 32;
    let first = Class::all().find(|c| c.stride() as u128 >= need);
    assert_eq!(Class::of(len), first, "{len} bytes");
    match placement {
        Ok(Placement::Class(class)) => {
            assert!(align <= SEGMENT_ALIGN && len <= LARGEST_CLASS_LEN);
            assert_eq!(Some(class), first);
            assert_eq!(class.stride() % SEGMENT_ALIGN, 0);
            assert!(class.stride() - 32 >= len);
            if len >= 4096 {
                assert!((class.stride() - len) * 8 <= class.stride(), "{len} bytes lose more than an eighth");
            }
            if len.is_power_of_two() {
                assert!(class.stride() <= len + 64);
            }
        }
        Ok(Placement::Pages { span, align: pages }) => {
            assert!(align > SEGMENT_ALIGN || first.is_none());
            assert_eq!(span as u128, need);
            assert_eq!(segment::span(len), Ok(span));
            assert_eq!(pages, align.div_ceil(PAGE));
            let bytes = Placement::Pages { span, align: pages }.bytes();
            assert!(bytes >= span && bytes < span + PAGE);
            if align <= SEGMENT_ALIGN {
                assert!((bytes - len) * 8 <= bytes);
            }
        }
        Err(Error::TooLong { largest, .. }) => assert!(len > largest && largest > isize::MAX as usize / 2),
        Err(error) => panic!("{len} bytes at {align}: {error}"),
    }
}

struct Held {
    buf: PinnedBuf,
    range: (usize, usize),
}

struct World {
    pool: Pool,
    capacity: usize,
    held: Vec<Held>,
}

impl World {
    fn new(shape: Shape) -> Self {
        static MACHINE: LazyLock<hand::Machine> = LazyLock::new(|| hand::Machine::new(1, 4096, 0));
        MACHINE.renew(0);
        let device = MACHINE.device(0);
        let capacity = (usize::from(shape.pages) % PAGES + 1) * PAGE;
        let part = |n: u16| (usize::from(n) % PAGES + 1) * PAGE;
        let pool = Pool::builder(&device)
            .capacity(capacity)
            .extent(part(shape.extent))
            .region(part(shape.region))
            .initial(usize::from(shape.initial) * PAGE % (capacity + 1))
            .thread_cache(part(shape.cache))
            .pin_threads(1)
            .unpinned(Unpinned::Allow)
            .build()
            .expect("a sane configuration");
        Self { pool, capacity, held: Vec::new() }
    }

    fn welcome(&mut self, mut buf: PinnedBuf, len: usize, align: usize) {
        let start = buf.as_ptr().addr();
        let range = (start, start + len.next_multiple_of(32) + 32);
        assert_eq!(start % align.max(SEGMENT_ALIGN), 0);
        assert_eq!(buf.capacity(), len);
        let inside = |(a, b): (usize, usize)| {
            self.pool.regions().iter().any(|r| {
                let base = r.base.as_ptr().addr();
                base <= a && b <= base + r.len
            })
        };
        assert!(inside(range), "{range:x?} is in no region");
        for other in &self.held {
            let other = other.range;
            assert!(range.1 <= other.0 || other.1 <= range.0, "{range:x?} overlaps {other:x?}");
        }
        // Both ends are mapped.
        buf.spare_capacity_mut()[0].write(1);
        buf.spare_capacity_mut()[len - 1].write(2);
        self.held.push(Held { buf, range });
    }

    fn take(&mut self, len: usize, align: usize) -> bool {
        let valid = align.is_power_of_two() && align <= MAX_ALIGN;
        match self.pool.try_checkout(Request::new(len).align(align)) {
            Ok(buf) => {
                assert!(valid && len > 0);
                self.welcome(buf, len, align);
                true
            }
            Err(Error::Argument(text)) if text.contains("no alignment") => {
                assert!(!valid);
                false
            }
            Err(Error::ZeroLength) => {
                assert_eq!(len, 0);
                false
            }
            Err(Error::TooLong { largest, .. }) => {
                assert!(len > largest && largest < self.capacity);
                false
            }
            Err(Error::Exhausted(_)) => false,
            Err(error) => panic!("{len} bytes at {align}: {error}"),
        }
    }

    fn step(&mut self, step: Step) {
        match step {
            Step::Take { len, shift, align } => {
                let len = (len as usize >> (shift % 32)) % (PAGES * PAGE + 8);
                let align = match align {
                    0..160 => 64,
                    160..250 => 1 << (align % 22),
                    _ => usize::from(align),
                };
                self.take(len, align);
            }
            Step::TakeTwo { len } => {
                let lens = len.map(|l| usize::from(l).max(1));
                match self.pool.checkout_many(&lens.map(Request::new), Some(std::time::Duration::ZERO)) {
                    Ok(bufs) => {
                        bufs.into_iter().zip(lens).for_each(|(b, len)| self.welcome(b, len, SEGMENT_ALIGN));
                    }
                    Err(Error::TooLong { .. } | Error::Timeout(_) | Error::Impossible { .. }) => {}
                    Err(error) => panic!("{error}"),
                }
            }
            Step::Give { at } => {
                if !self.held.is_empty() {
                    let at = usize::from(at) % self.held.len();
                    drop(self.held.swap_remove(at));
                }
            }
            Step::GiveFrom { at } => {
                let at = usize::from(at) % (self.held.len() + 1);
                self.held.drain(at..);
            }
            Step::Trim { keep } => {
                let total = |pool: &Pool| pool.regions().iter().map(|r| r.len).sum::<usize>();
                let before = total(&self.pool);
                let freed = self.pool.trim(usize::from(keep) * PAGE);
                assert_eq!(total(&self.pool), before - freed);
            }
        }
    }

    fn check(&self) {
        let found = self.pool.check().unwrap_or_else(|e| panic!("{e}"));
        let stats = self.pool.stats();
        assert_eq!(found.checked_out_bytes, stats.checked_out_bytes);
        let requested: usize = self.held.iter().map(|h| h.buf.capacity()).sum();
        assert_eq!(stats.requested_bytes, requested);
        assert_eq!(stats.waiting, 0);
        assert!(stats.pinned_bytes + stats.unpinned_bytes <= self.capacity);
    }
}

fuzz_target!(|input: Input| {
    let Input { lens, align, align_shift, shape, steps, last } = input;
    for len in lens {
        let len = (len >> (align_shift / 4)) as usize;
        rule(len, align as usize);
        rule(len, 1usize.checked_shl(u32::from(align_shift)).unwrap_or(0));
        rule(len, 64);
        assert_eq!(Class::new(len).is_some(), len < CLASSES);
    }

    let mut world = World::new(shape);
    for step in steps.into_iter().take(STEPS) {
        world.step(step);
        world.check();
    }
    world.held.clear();
    world.check();
    let stats = world.pool.stats();
    assert_eq!((stats.checked_out_bytes, stats.requested_bytes), (0, 0));
    // Memory that was cut for one class or pinned in one shape serves any other: every request that is not too long.
    let extent = (usize::from(shape.extent) % PAGES + 1) * PAGE;
    let len = last as usize % (extent.min(world.capacity) - 32) + 1;
    assert!(world.take(len, SEGMENT_ALIGN), "{len} bytes, and nothing else is out");
    world.check();
});
