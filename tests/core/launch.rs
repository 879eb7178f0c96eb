//! Host functions on the streams of host devices, which stand for a server's kernels.

use std::slice::from_ref;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Weak, mpsc};
use std::time::Duration;

use pinpool::host::{Call, Failure, Fault, HostConfig, HostNode, launch};
use pinpool::{Device, DeviceSlice, Error, Stream};

use crate::{filled, on, pool};

struct Rig {
    node: HostNode,
    device: Device,
    stream: Stream,
}

impl Rig {
    fn new(config: HostConfig) -> Self {
        let (node, device) = on(config);
        let stream = device.stream().unwrap();
        Self { node, device, stream }
    }

    /// Device memory that holds these bytes.
    fn holding(&self, bytes: &[u8]) -> DeviceSlice {
        let memory = self.device.alloc(bytes.len()).unwrap();
        self.stream.upload_blocking(bytes, &memory).unwrap();
        memory.slice(..).unwrap()
    }

    fn bytes(&self, memory: &DeviceSlice) -> Vec<u8> {
        let mut bytes = vec![0; memory.len()];
        self.stream.download_blocking(memory, &mut bytes).unwrap();
        bytes
    }
}

/// One that runs what is submitted as soon as it can, and one that runs it late.
fn rigs() -> [Rig; 2] {
    [HostConfig::new(), HostConfig::new().late(Duration::from_millis(1), 3)].map(Rig::new)
}

/// A value for a function to own, and one that tells whether it was dropped.
fn owned() -> (Arc<()>, Weak<()>) {
    let value = Arc::new(());
    let told = Arc::downgrade(&value);
    (value, told)
}

fn is_dropped(told: &Weak<()>) -> bool {
    told.strong_count() == 0
}

#[test]
fn a_function_runs_between_the_copies_before_and_behind_it() {
    // Longer than the parts in which the device copies.
    const LEN: usize = (2 << 20) + 3;
    for rig in rigs() {
        let pool = pool(&rig.device, 16 << 20);
        let memory = rig.device.alloc(LEN).unwrap();
        let whole = || memory.slice(..).unwrap();
        for round in 0..3 {
            drop(rig.stream.upload(filled(&pool, LEN, round), &memory).unwrap());
            for _ in 0..2 {
                let add = move |_: &[&[u8]], writes: &mut [&mut [u8]]| {
                    assert_eq!(writes[0].len(), LEN);
                    writes[0].iter_mut().for_each(|b| *b += 10);
                };
                drop(launch(&rig.stream, &[], &[whole()], add).unwrap());
            }
            let output = rig.stream.download(&memory, pool.checkout(LEN).unwrap()).unwrap().wait().unwrap();
            assert!(output.iter().all(|b| *b == round + 20));
        }
        pool.check().unwrap();
    }
}

#[test]
fn a_handle_tells_when_the_function_has_run() {
    for rig in rigs() {
        let memory = rig.holding(b"abc");
        let (send, ran) = mpsc::channel();
        let copy = memory.clone();
        let run = move |reads: &[&[u8]], _: &mut [&mut [u8]]| send.send(reads[0].to_vec()).unwrap();
        launch(&rig.stream, &[copy], &[], run).unwrap().wait().unwrap();
        assert_eq!(ran.try_recv().unwrap(), b"abc");
        // Without any memory it is a callback in stream order.
        let (send, ran) = mpsc::channel();
        launch(&rig.stream, &[], &[], move |_, _| send.send(()).unwrap()).unwrap().wait().unwrap();
        ran.try_recv().unwrap();
    }
}

#[test]
fn the_lists_may_overlap_and_the_last_write_wins() {
    for rig in rigs() {
        let memory = rig.holding(b"0123456789");
        let part = |range: std::ops::Range<usize>| memory.slice(range).unwrap();
        let (reads, writes) = ([part(0..6)], [part(2..6), part(4..8)]);
        let run = |reads: &[&[u8]], writes: &mut [&mut [u8]]| {
            assert_eq!((reads[0], &*writes[0], &*writes[1]), (&b"012345"[..], &b"2345"[..], &b"4567"[..]));
            writes[0].fill(b'a');
            assert_eq!(reads[0], b"012345");
            writes[1].fill(b'b');
        };
        launch(&rig.stream, &reads, &writes, run).unwrap().wait().unwrap();
        assert_eq!(rig.bytes(&memory), b"01aabbbb89");
    }
}

#[test]
fn a_panic_leaves_the_memory_and_the_stream_as_they_were() {
    for rig in rigs() {
        let memory = rig.holding(b"abc");
        let (witness, told) = owned();
        let run = move |_: &[&[u8]], writes: &mut [&mut [u8]]| {
            let _witness = witness;
            writes[0].fill(0);
            panic!("as the test wants");
        };
        launch(&rig.stream, &[], from_ref(&memory), run).unwrap().wait().unwrap();
        assert_eq!((rig.bytes(&memory), is_dropped(&told)), (b"abc".to_vec(), true));
        launch(&rig.stream, &[], from_ref(&memory), |_, writes| writes[0].fill(b'z'))
            .unwrap()
            .wait()
            .unwrap();
        assert_eq!(rig.bytes(&memory), b"zzz");
        rig.device.stream().unwrap();
    }
}

#[test]
fn memory_stays_allocated_until_the_function_has_run() {
    for rig in rigs() {
        rig.node.hang(0);
        let memory = rig.device.alloc(3).unwrap();
        let (send, ran) = mpsc::channel();
        let run = move |_: &[&[u8]], writes: &mut [&mut [u8]]| send.send(writes[0].len()).unwrap();
        let handle = launch(&rig.stream, &[], &[memory.slice(1..).unwrap()], run).unwrap();
        drop(memory);
        assert_eq!(rig.node.live(0).allocations, 1);
        rig.node.resume(0);
        handle.wait().unwrap();
        assert_eq!(ran.try_recv(), Ok(2));
        let Rig { node, device, stream } = rig;
        drop(stream);
        device.close(Duration::from_secs(10)).unwrap();
        assert_eq!(node.live(0).allocations, 0);
    }
}

#[test]
fn memory_of_another_device_is_refused() {
    let rig = Rig::new(HostConfig::new().devices(2));
    let other = Device::on(&rig.node, 1).unwrap().alloc(3).unwrap().slice(..).unwrap();
    let own = rig.holding(b"abc");
    let (witness, told) = owned();
    let refused = launch(&rig.stream, &[own], &[other], move |_, _| drop(witness));
    assert!(matches!(refused, Err(Error::Mismatch { .. })), "{refused:?}");
    assert_eq!((is_dropped(&told), rig.node.queued(0)), (true, 0));
}

#[test]
fn a_device_that_dies_drops_what_has_not_begun() {
    for rig in rigs() {
        rig.node.hang(0);
        let memory = rig.device.alloc(3).unwrap().slice(..).unwrap();
        let (witness, told) = owned();
        let handle = launch(&rig.stream, &[], &[memory], move |_, _| {
            drop(witness);
            unreachable!("the device is dead");
        });
        rig.node.kill(0);
        assert!(is_dropped(&told));
        assert!(handle.unwrap().wait().unwrap_err().is_device_lost());
        let after = launch(&rig.stream, &[], &[], |_, _| unreachable!("the device is dead"));
        assert!(after.unwrap_err().is_device_lost());
    }
}

#[test]
fn a_device_can_be_killed_while_a_function_runs() {
    for rig in rigs() {
        let memory = rig.holding(b"abc");
        let node = rig.node.clone();
        let (send, ended) = mpsc::channel();
        let run = move |_: &[&[u8]], writes: &mut [&mut [u8]]| {
            node.kill(0);
            writes[0].fill(0);
            send.send(()).unwrap();
        };
        let handle = launch(&rig.stream, &[], &[memory], run).unwrap();
        assert!(handle.wait().unwrap_err().is_device_lost());
        ended.recv().unwrap();
    }
}

#[test]
fn a_function_may_use_the_pool_and_other_streams() {
    for rig in rigs() {
        let pool = pool(&rig.device, 1 << 20);
        let (other, memory) = (rig.device.stream().unwrap(), rig.device.alloc(3).unwrap());
        let (send, said) = mpsc::channel();
        let run = move |_: &[&[u8]], _: &mut [&mut [u8]]| {
            let mut buf = pool.checkout(3).unwrap();
            buf.extend_from_slice(b"abc");
            other.upload(buf, &memory).unwrap().wait().unwrap();
            other.upload_blocking(b"abc", &memory).unwrap();
            pool.check().unwrap();
            send.send(()).unwrap();
        };
        launch(&rig.stream, &[], &[], run).unwrap().wait().unwrap();
        said.try_recv().expect("the function came to its end");
        rig.stream.synchronize().unwrap();
    }
}

/// The bytes of one function or copy stay whole in ranges that lie within a stripe of the device's memory, and no
/// sanitizer has anything to say.
#[test]
fn streams_that_write_the_same_memory_are_no_data_race() {
    const ROUNDS: u8 = 50;
    let rig = Rig::new(HostConfig::new());
    let memory = rig.holding(&[0; 5000]);
    let streams: Vec<Stream> = (0..3).map(|_| rig.device.stream().unwrap()).collect();
    std::thread::scope(|scope| {
        for (n, stream) in streams.iter().enumerate() {
            let memory = &memory;
            scope.spawn(move || {
                for round in 0..ROUNDS {
                    let value = n as u8 * ROUNDS + round;
                    let fill = move |_: &[&[u8]], writes: &mut [&mut [u8]]| writes[0].fill(value);
                    drop(launch(stream, &[], from_ref(memory), fill).unwrap());
                    let whole = |reads: &[&[u8]], _: &mut [&mut [u8]]| {
                        assert!(reads[0].iter().all(|b| *b == reads[0][0]));
                    };
                    launch(stream, from_ref(memory), &[], whole).unwrap().wait().unwrap();
                    stream.upload_blocking(&[value; 5000], memory).unwrap();
                }
            });
        }
    });
    let bytes = rig.bytes(&memory);
    assert!(bytes.iter().all(|b| *b == bytes[0]));
}

#[test]
fn a_failing_launch_decides_nothing() {
    for rig in rigs() {
        let fail = |failure| rig.node.fail(Fault { device: 0, call: Call::Launch, nth: 0, failure });
        let count = Arc::new(AtomicUsize::new(0));
        let try_one = || {
            let (witness, told) = owned();
            let count = count.clone();
            let run = move |_: &[&[u8]], _: &mut [&mut [u8]]| {
                let _witness = witness;
                count.fetch_add(1, Ordering::SeqCst);
            };
            (launch(&rig.stream, &[], &[], run), told)
        };
        fail(Failure::Transient);
        let (refused, told) = try_one();
        refused.unwrap_err();
        assert_eq!((is_dropped(&told), count.load(Ordering::SeqCst)), (true, 0));
        fail(Failure::RunsAnyway);
        let (refused, told) = try_one();
        refused.unwrap_err();
        rig.stream.synchronize().unwrap();
        assert_eq!((is_dropped(&told), count.load(Ordering::SeqCst)), (true, 1));
        fail(Failure::Stall);
        let (stalled, _) = try_one();
        assert_eq!(count.load(Ordering::SeqCst), 1);
        rig.node.resume(0);
        stalled.unwrap().wait().unwrap();
        assert_eq!(count.load(Ordering::SeqCst), 2);
    }
}
