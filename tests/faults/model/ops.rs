//! What a case is made of: how the pool is set up, and the operations on it. Plain data, so that a failing case can be
//! shrunk, printed and read.
//!
//! Operations that name a buffer, a stream or a copy in flight carry an index that is taken modulo what there is, so
//! every sequence of operations makes sense and removing some of them still gives a case.

use proptest::prelude::*;

use crate::support::hand::{CALLS, Failure};

/// Devices of the machine.
pub const DEVICES: usize = 2;
/// Streams of each device.
pub const STREAMS: usize = 2;

/// How a case begins and ends.
#[derive(Clone, Debug)]
pub struct Setup {
    pub seed: u64,
    /// In KiB.
    pub capacity: usize,
    pub region: usize,
    pub extent: usize,
    pub initial: usize,
    pub cache: usize,
    pub end: End,
}

/// How a case ends.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum End {
    /// Everything is drained and dropped, then trimmed.
    Quiet,
    /// The pool is dropped first, while buffers are out and in flight, and the buffers are used on.
    DropPool,
    /// The pool is shut down while buffers are out and in flight.
    Shutdown,
}

/// A request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Size {
    pub len: usize,
    pub align: usize,
}

/// Which thread does it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Who {
    Main,
    /// A thread that lives as long as the case, idle between its turns, and keeps what it caches.
    Helper,
    /// A thread that ends at once.
    Fresh,
}

/// What is done with a stream-ready buffer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Use {
    /// Something is downloaded into it.
    Land(Keep),
    OtherStream,
    Drop,
    Wait,
}

/// Whether the handle to what is in flight is kept, or dropped at once.
type Keep = bool;
/// Whether a request waits where it cannot be served at once.
type Waits = bool;

#[derive(Clone, Debug)]
pub enum Op {
    Checkout(Size, Waits, Who),
    Many(Vec<Size>, Waits),
    Join(Vec<Size>),
    /// All that there is of this size is checked out, and then so many requests for one more wait.
    Queue(Size, usize),
    PollWaiting,
    Cancel(usize),
    Drop(usize, Who),
    /// Buffer, stream.
    Upload(usize, usize, Keep),
    /// Buffer, stream, region.
    Download(usize, usize, usize, Keep),
    /// Buffer, and two streams that it is uploaded on.
    Share(usize, usize, usize),
    DropShared(usize),
    Hold(usize, usize, Keep),
    Claim(usize, Size, Use),
    /// All segments of this size are put in flight, on this stream and the next, and then some of them are
    /// claimed.
    Crowd(usize, Size, Vec<Use>),
    Wait(usize),
    IsDone(usize),
    Await(usize),
    DropFlight(usize),
    /// Device, which of its streams that can run something, how many operations.
    Step(usize, usize, u8),
    Reap(usize),
    Drain,
    Trim(usize),
    Hang(usize),
    Resume(usize),
    Sync(usize),
    /// One stream waits for another.
    WaitFor(usize, usize),
    Kill(usize),
    /// The `nth` such call fails while these are done. They do not step the devices.
    Fault(&'static str, u64, Failure, Vec<Op>),
}

fn size() -> impl Strategy<Value = Size> {
    let len = prop_oneof![
        // Often the same, so that segments meet their like.
        30 => prop::sample::select(vec![1usize, 100, 1000, 4096, 5000, 20_000, 61_000, 65_536, 200_000]),
        30 => (0u32..17, 0usize..1 << 17).prop_map(|(e, f)| (1 << e) + f % (1 << e)),
        1 => Just(0),
        1 => Just(usize::MAX),
        1 => (19u32..26).prop_map(|e| 1 << e),
    ];
    let align = prop_oneof![
        12 => Just(64usize),
        4 => (0u32..22).prop_map(|e| 1 << e),
        1 => prop_oneof![Just(0usize), Just(3), Just(1 << 22)],
    ];
    (len, align).prop_map(|(len, align)| Size { len, align })
}

/// Of which the pool has few.
fn large() -> impl Strategy<Value = Size> {
    prop::sample::select(vec![20_000usize, 40_000, 61_000]).prop_map(|len| Size { len, align: 64 })
}

fn who() -> impl Strategy<Value = Who> {
    prop_oneof![4 => Just(Who::Main), 1 => Just(Who::Helper), 1 => Just(Who::Fresh)]
}

fn plain() -> impl Strategy<Value = Op> {
    let at = || 0usize..64;
    let keep = || prop::bool::weighted(0.35);
    let waits = || prop::bool::weighted(0.4);
    let usage = prop_oneof![
        5 => keep().prop_map(Use::Land), 1 => Just(Use::OtherStream), 2 => Just(Use::Drop), 2 => Just(Use::Wait)
    ];
    prop_oneof![
        40 => (size(), waits(), who()).prop_map(|(s, w, who)| Op::Checkout(s, w, who)),
        3 => (prop::collection::vec(size(), 0..4), waits()).prop_map(|(s, w)| Op::Many(s, w)),
        5 => prop::collection::vec(size(), 1..3).prop_map(Op::Join),
        2 => (large(), 1usize..5).prop_map(|(s, n)| Op::Queue(s, n)),
        5 => Just(Op::PollWaiting),
        3 => at().prop_map(Op::Cancel),
        10 => (at(), who()).prop_map(|(b, w)| Op::Drop(b, w)),
        20 => (at(), at(), keep()).prop_map(|(b, l, k)| Op::Upload(b, l, k)),
        14 => (at(), at(), at(), keep()).prop_map(|(b, l, r, k)| Op::Download(b, l, r, k)),
        4 => (at(), at(), at()).prop_map(|(b, l, m)| Op::Share(b, l, m)),
        3 => at().prop_map(Op::DropShared),
        4 => (at(), at(), keep()).prop_map(|(b, l, k)| Op::Hold(b, l, k)),
        8 => (at(), size(), usage.clone()).prop_map(|(l, s, u)| Op::Claim(l, s, u)),
        6 => (at(), large(), prop::collection::vec(usage, 1..5)).prop_map(|(l, s, u)| Op::Crowd(l, s, u)),
        5 => at().prop_map(Op::Wait),
        4 => at().prop_map(Op::IsDone),
        4 => at().prop_map(Op::Await),
        5 => at().prop_map(Op::DropFlight),
        16 => (0..DEVICES, at(), 1u8..6).prop_map(|(d, n, k)| Op::Step(d, n, k)),
        8 => (0..DEVICES).prop_map(Op::Reap),
        2 => Just(Op::Drain),
        2 => (0usize..2048).prop_map(Op::Trim),
        2 => Just(Op::Trim(0)),
        2 => at().prop_map(Op::Hang),
        3 => at().prop_map(Op::Resume),
        2 => at().prop_map(Op::Sync),
        6 => (at(), at()).prop_map(|(a, b)| Op::WaitFor(a, b)),
    ]
}

/// Everything, trouble included.
fn op(calm: bool) -> BoxedStrategy<Op> {
    if calm {
        return plain().boxed();
    }
    // Calls that are made all the time, so that most faults strike.
    let call = prop::sample::select(vec![
        "cuMemcpyHtoDAsync_v2",
        "cuEventRecord",
        "cuEventCreate",
        "cuEventQuery",
        "cuMemHostRegister_v2",
    ]);
    let failure = prop_oneof![
        4 => Just(Failure::Transient), 2 => Just(Failure::RunsAnyway), 2 => Just(Failure::Stall),
        2 => Just(Failure::Capture), 1 => Just(Failure::Argument), 1 => Just(Failure::DeviceLost),
    ];
    let under = plain().prop_filter("does not step the device", Op::stays_put);
    let strikes = (0..DEVICES, call, 1u64..3, failure.clone(), 0usize..6, any::<bool>(), size()).prop_map(
        |(d, c, n, f, lane, keep, size)| {
            let up = Op::Upload(0, lane, keep);
            let out = Op::Checkout(size, false, Who::Main);
            Op::Fault(c, n, f, vec![out, up.clone(), up, Op::Reap(d), Op::Reap(d)])
        },
    );
    let any = (prop::sample::select(&CALLS[..]), 1u64..3, failure, prop::collection::vec(under, 1..4))
        .prop_map(|(c, n, f, ops)| Op::Fault(c, n, f, ops));
    let fault = prop_oneof![3 => strikes, 1 => any];
    prop_oneof![100 => plain(), 10 => fault, 1 => (0..DEVICES).prop_map(Op::Kill)].boxed()
}

impl Op {
    /// Whether it leaves the device's queued work where it is.
    fn stays_put(&self) -> bool {
        match self {
            Self::Checkout(_, waits, _) | Self::Many(_, waits) => !waits,
            Self::Wait(_) | Self::Step(..) | Self::Drain | Self::Sync(_) => false,
            Self::Claim(..) | Self::Crowd(..) => false,
            _ => true,
        }
    }
}

fn setup() -> impl Strategy<Value = Setup> {
    let end = prop_oneof![Just(End::Quiet), Just(End::DropPool), Just(End::Shutdown)];
    (
        any::<u64>(),
        prop::sample::select(vec![64usize, 112, 256, 304, 1024, 2048]),
        prop::sample::select(vec![64usize, 128, 512, 2048]),
        prop::sample::select(vec![64usize, 256, 2048]),
        0usize..3,
        prop::sample::select(vec![0usize, 8, 64, 256]),
        end,
    )
        .prop_map(|(seed, capacity, region, extent, initial, cache, end)| {
            let initial = (initial * region).min(capacity);
            Setup { seed, capacity, region, extent, initial, cache, end }
        })
}

/// A case: half of them without faults, since a fault makes it impossible to demand that everything comes back.
pub fn case() -> impl Strategy<Value = (Setup, Vec<Op>)> {
    (setup(), any::<bool>())
        .prop_flat_map(|(setup, calm)| (Just(setup), prop::collection::vec(op(calm), 0..130)))
}
