//! Host functions on the streams of host devices, which stand for a server's kernels.

use std::slice::from_ref;

use pinpool::host::launch;

use super::*;

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
            for before in [round, round + 10] {
                let add = move |_: &[&[u8]], writes: &mut [&mut [u8]]| {
                    assert!(*writes[0] == vec![before; LEN]);
                    writes[0].fill(before + 10);
                };
                drop(launch(&rig.stream, &[], &[whole()], add).unwrap());
            }
            let output = rig.stream.download(&memory, pool.checkout(LEN).unwrap()).unwrap().wait().unwrap();
            assert!(*output == vec![round + 20; LEN]);
        }
        // The handle tells that it has run. Without any memory it is a callback in stream order, which may use the pool
        // and other streams.
        let (send, ran) = mpsc::channel();
        let other = rig.device.stream().unwrap();
        let run = move |_: &[&[u8]], _: &mut [&mut [u8]]| {
            drop(other.upload(filled(&pool, 3, 1), &memory).unwrap().wait().unwrap());
            pool.check().unwrap();
            send.send(()).unwrap();
        };
        launch(&rig.stream, &[], &[], run).unwrap().wait().unwrap();
        ran.try_recv().expect("the function came to its end");
    }
}

#[test]
fn the_lists_may_overlap_the_last_write_wins_and_a_panic_writes_nothing() {
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
        // A panic leaves the memory and the stream as they were.
        let memory = rig.holding(b"abc");
        let told = Arc::new(());
        let witness = told.clone();
        let run = move |_: &[&[u8]], writes: &mut [&mut [u8]]| {
            let _witness = witness;
            writes[0].fill(0);
            panic!("as the test wants");
        };
        launch(&rig.stream, &[], from_ref(&memory), run).unwrap().wait().unwrap();
        assert_eq!((rig.bytes(&memory), Arc::strong_count(&told) == 1), (b"abc".to_vec(), true));
        let run = |_: &[&[u8]], writes: &mut [&mut [u8]]| writes[0].fill(b'z');
        launch(&rig.stream, &[], from_ref(&memory), run).unwrap().wait().unwrap();
        assert_eq!(rig.bytes(&memory), b"zzz");
    }
}

#[test]
fn memory_stays_allocated_until_the_function_has_run() {
    let rig = Rig::new(HostConfig::new().devices(2));
    let far = Device::on(&rig.node, 1).unwrap().alloc(3).unwrap();
    rig.node.hang(0);
    let memory = rig.device.alloc(3).unwrap();
    let (send, ran) = mpsc::channel();
    let run = move |_: &[&[u8]], writes: &mut [&mut [u8]]| send.send(writes[0].len()).unwrap();
    let handle = launch(&rig.stream, &[], &[memory.slice(1..).unwrap()], run).unwrap();
    // Memory of another device is refused.
    let told = Arc::new(());
    let witness = told.clone();
    let refused =
        launch(&rig.stream, &[memory.slice(..).unwrap()], &[far.slice(..).unwrap()], move |_, _| {
            drop(witness)
        });
    assert!(matches!(refused, Err(Error::Mismatch { .. })), "{refused:?}");
    assert_eq!((Arc::strong_count(&told) == 1, rig.node.live(0).queued), (true, 1));
    drop(memory);
    assert_eq!(rig.node.live(0).allocations, 1);
    rig.node.resume(0);
    handle.wait().unwrap();
    assert_eq!(ran.try_recv(), Ok(2));
    let Rig { node, device, stream } = rig;
    drop(stream);
    device.close(HANG).unwrap();
    assert_eq!(node.live(0).allocations, 0);
}

#[test]
fn a_device_that_dies_drops_what_has_not_begun_and_ends_what_runs() {
    for rig in rigs() {
        let memory = rig.holding(b"abc");
        // What is behind the function that kills the device never begins.
        let node = rig.node.clone();
        let (send, ended) = mpsc::channel();
        let run = move |_: &[&[u8]], writes: &mut [&mut [u8]]| {
            node.kill(0);
            writes[0].fill(0);
            send.send(()).unwrap();
        };
        rig.node.hang(0);
        let runs = launch(&rig.stream, &[], from_ref(&memory), run).unwrap();
        let told = Arc::new(());
        let witness = told.clone();
        let behind = launch(&rig.stream, &[], &[memory], move |_, _| {
            drop(witness);
            unreachable!("the device is dead");
        });
        rig.node.resume(0);
        ended.recv().unwrap();
        assert!(runs.wait().unwrap_err().is_device_lost() && Arc::strong_count(&told) == 1);
        assert!(behind.unwrap().wait().unwrap_err().is_device_lost());
        let after = launch(&rig.stream, &[], &[], |_, _| unreachable!("the device is dead"));
        assert!(after.unwrap_err().is_device_lost());
    }
}

/// The bytes of one function or copy stay whole in ranges that lie within a stripe of the device's memory, and no
/// sanitizer has anything to say.
#[test]
fn streams_that_write_the_same_memory_are_no_data_race() {
    const ROUNDS: u8 = 50;
    let rig = Rig::new(HostConfig::new());
    let memory = rig.holding(&[0; 5000]);
    let is_whole = |bytes: &[u8]| bytes == [bytes[0]; 5000];
    std::thread::scope(|scope| {
        for n in 0..3 {
            let (stream, memory) = (rig.device.stream().unwrap(), &memory);
            scope.spawn(move || {
                for value in n * ROUNDS..(n + 1) * ROUNDS {
                    let fill = move |_: &[&[u8]], writes: &mut [&mut [u8]]| writes[0].fill(value);
                    drop(launch(&stream, &[], from_ref(memory), fill).unwrap());
                    let (send, told) = mpsc::channel();
                    let look = move |reads: &[&[u8]], _: &mut [&mut [u8]]| {
                        send.send(is_whole(reads[0])).unwrap();
                    };
                    launch(&stream, from_ref(memory), &[], look).unwrap().wait().unwrap();
                    assert!(told.recv().unwrap(), "a copy or a function was half there");
                    stream.upload_blocking(&[value; 5000], memory).unwrap();
                }
            });
        }
    });
    assert!(is_whole(&rig.bytes(&memory)));
}

/// A launch that is refused may have been queued all the same; the function is dropped in any case.
#[test]
fn a_failing_launch_decides_nothing() {
    for rig in rigs() {
        let count = Arc::new(AtomicUsize::new(0));
        for (failure, runs) in [(Failure::Transient, 0), (Failure::RunsAnyway, 1)] {
            rig.node.fail(Fault { device: 0, call: Call::Launch, nth: 0, failure });
            let counted = count.clone();
            let run = move |_: &[&[u8]], _: &mut [&mut [u8]]| _ = counted.fetch_add(1, Ordering::SeqCst);
            assert!(launch(&rig.stream, &[], &[], run).is_err(), "{failure:?}");
            rig.stream.synchronize().unwrap();
            let ended = (count.load(Ordering::SeqCst), Arc::strong_count(&count));
            assert_eq!(ended, (runs, 1), "{failure:?}");
        }
    }
}
