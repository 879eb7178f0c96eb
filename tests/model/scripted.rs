//! Cases written by hand, for transitions that random ones take only by luck.

use crate::ops::{End, Keep, Op, Patience, Setup, Size, Use, Who};
use crate::support::hand::{CALLS, Failure, queues};

/// Every call that the model's operations make, with every failure that it can have.
pub fn faults() -> impl Iterator<Item = (&'static str, Failure)> {
    let all = CALLS.into_iter().flat_map(|call| Failure::ALL.map(|failure| (call, failure)));
    all.filter(|(call, failure)| queues(call) || !matches!(failure, Failure::RunsAnyway | Failure::Stall))
}

fn setup(end: End) -> Setup {
    Setup {
        seed: 1,
        capacity: 256,
        region: 64,
        extent: 64,
        initial: 64,
        cache: 8,
        lanes: [2, 2],
        end,
        closing: None,
    }
}

fn size(len: usize) -> Size {
    Size { len, align: 64 }
}

fn out(len: usize) -> Op {
    Op::Checkout(size(len), Patience::Try, Who::Main)
}

fn up(lane: usize, keep: Keep) -> Op {
    Op::Upload(0, lane, None, keep, false)
}

/// One call fails in one way, while there is work in flight before and after it.
fn failing(call: &'static str, failure: Failure) -> Vec<Op> {
    let target = match call {
        "cuMemHostRegister_v2" => vec![out(50 << 10), out(50 << 10)],
        "cuMemHostUnregister" => vec![Op::Trim(0)],
        "cuMemAlloc_v2" | "cuStreamSynchronize" => vec![Op::Blocking(0)],
        "cuMemFree_v2" => vec![Op::DropRegion(0)],
        "cuStreamCreate" | "cuStreamDestroy_v2" => vec![Op::NewStream(0)],
        "cuMemcpyHtoDAsync_v2" => vec![up(0, Keep::Keep)],
        "cuMemcpyDtoHAsync_v2" => vec![Op::Download(0, 0, 0, Keep::Keep)],
        "cuMemcpyDtoDAsync_v2" => vec![Op::OnDevice(0, 0)],
        "cuStreamWaitEvent" => vec![Op::WaitFor(1, 0), Op::WaitFor(0, 1)],
        // Events are destroyed when a device is closed.
        "cuEventDestroy_v2" => vec![],
        _ => vec![up(0, Keep::Keep), Op::Reap(0)],
    };
    let mut ops: Vec<Op> = Vec::new();
    if call == "cuEventCreate" {
        // So that no event is left to use again.
        ops.extend([out(600), up(1, Keep::Drop), Op::Reap(0)]);
    }
    if call == "cuMemFree_v2" {
        ops.extend([out(600), up(0, Keep::Drop), Op::Drain, out(600), up(1, Keep::Drop)]);
    }
    ops.extend([out(1000), out(2000), out(3000), up(0, Keep::Keep), up(2, Keep::Drop)]);
    if call == "cuMemHostUnregister" {
        // A region of its own, idle again.
        ops.extend([out(50 << 10), Op::Drop(1, Who::Main)]);
    }
    ops.push(Op::Fault(call, 1, failure, target));
    ops.extend([
        out(700),
        up(0, Keep::Keep),
        Op::Reap(0),
        Op::IsDone(0),
        out(2000),
        Op::Wait(0),
        Op::Wait(0),
    ]);
    ops
}

/// All cases, with their names.
pub fn all() -> Vec<(String, Setup, Vec<Op>)> {
    let mut cases: Vec<(String, Setup, Vec<Op>)> = Vec::new();
    for (call, failure) in faults() {
        for end in [End::Quiet, End::DropPool, End::Shutdown] {
            let closing = (call == "cuEventDestroy_v2").then_some(failure);
            let setup = Setup { closing, ..setup(end) };
            cases.push((format!("{call} fails: {failure:?}"), setup, failing(call, failure)));
        }
    }
    let mut case = |name: &str, end, ops| cases.push((name.into(), setup(end), ops));
    let full = |ops: &mut Vec<Op>| ops.extend((0..5).map(|_| out(60 << 10)));

    let mut ops = Vec::new();
    full(&mut ops);
    ops.push(Op::Many(vec![size(60 << 10), size(100)], Patience::Timeout));
    ops.push(Op::Many(vec![size(60 << 10); 6], Patience::Forever));
    case("full", End::Quiet, ops);

    let mut ops = Vec::new();
    full(&mut ops);
    ops.extend([
        Op::Join(vec![size(50 << 10)]),
        Op::Join(vec![size(50 << 10)]),
        Op::Join(vec![size(50 << 10)]),
    ]);
    ops.extend([
        Op::Drop(0, Who::Main),
        Op::Drop(0, Who::Fresh),
        Op::Cancel(0),
        Op::Cancel(1),
        Op::PollWaiting,
    ]);
    ops.push(Op::Join(vec![size(60 << 10), size(60 << 10)]));
    ops.push(Op::Join(vec![size(60 << 10), size(60 << 10)]));
    case("waiting, cancelled, then shut down", End::Shutdown, ops);

    let mut ops = Vec::new();
    for usage in [Use::Drop, Use::OtherStream, Use::Land(Keep::Keep), Use::Land(Keep::Drop), Use::Wait] {
        // All there is of that class is in flight on two streams, with something to download.
        full(&mut ops);
        ops.extend((0..5).map(|i| up(i % 2, Keep::Drop)));
        ops.extend([Op::Claim(0, size(60 << 10), usage), Op::Claim(1, size(61_430), usage), Op::Reap(0)]);
        ops.extend([Op::Claim(0, size(61_435), usage), Op::StepAny(3), Op::Drain, Op::Wait(0), Op::Wait(0)]);
        ops.extend((0..3).map(|_| Op::Drop(0, Who::Main)));
    }
    case("claims", End::Quiet, ops);

    let ops = vec![Op::Checkout(size(9), Patience::Forever, Who::Main)];
    let starved = Op::Fault("cuMemHostRegister_v2", 1, Failure::Argument, ops);
    cases.push(("growing fails".into(), Setup { initial: 0, ..setup(End::Quiet) }, vec![starved, out(9)]));
    let mut case = |name: &str, end, ops| cases.push((name.into(), setup(end), ops));

    let mut ops = Vec::new();
    ops.extend([out(1000), out(1000), up(0, Keep::Keep), Op::Hang(0), Op::Wait(0), Op::Resume(0), Op::Drain]);
    ops.extend([up(0, Keep::Keep), Op::Kill(0), Op::Wait(0)]);
    case("hung, then killed", End::DropPool, ops);

    // The waiter is stepped first, as far as it can go.
    let mut ops = Vec::new();
    for (waiter, other) in [(1, 0), (0, 1), (3, 2), (2, 3)] {
        ops.extend([out(1000), out(2000), out(3000), up(other, Keep::Drop), up(other, Keep::Drop)]);
        ops.extend([Op::WaitFor(waiter, other), up(waiter, Keep::Drop)]);
        ops.extend([1, 0].map(|nth| Op::Step(waiter / 2, nth, 1)));
        ops.extend([Op::StepAny(2), Op::Drain]);
    }
    case("streams wait for each other", End::Quiet, ops);

    case("shut down and drained", End::Shutdown, vec![out(1000), up(0, Keep::Drop)]);
    cases
}
