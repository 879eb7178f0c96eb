//! The copy queue, on every device: nothing is lost, nothing is early, order is what handles say.

use std::sync::Mutex;

use super::copier::{HANG, all_back};
use super::*;

fn read(on: &Subject, pool: &Pool, memory: &DeviceBuffer) -> Vec<u8> {
    fetch(pool, &on.stream(), memory)
}

pub(super) fn round_trips(on: &Subject) {
    let (pool, queue) = (on.pool(16 << 20), on.device.copy_queue().unwrap());
    let memory = on.alloc(1 << 20);
    let sizes = [1, 2, 63, 64, 65, 1000, 4095, 4096, 4097, 65_537, 300_001];
    for (i, len) in sizes.into_iter().enumerate() {
        for (j, offset) in [0, 1, 4097].into_iter().enumerate() {
            let sent = bytes(i * 8 + j, len + j);
            let range = || memory.slice(offset..offset + len);
            let buf = queue.upload_part(filled(&pool, &sent), j.., range()).unwrap().wait().unwrap();
            assert!(*buf == *sent, "an upload leaves its source as it was");
            let back = queue.download(range(), pool.checkout(len).unwrap()).unwrap().wait().unwrap();
            assert!(*back == sent[j..], "{len} bytes at {offset}");
        }
    }
    // Many at once, some of whose handles are dropped, beside what must stay as it is.
    let pieces = 300;
    drop(queue.upload(filled(&pool, &[7; 300 * 96]), &memory).unwrap().wait().unwrap());
    let mut kept = Vec::new();
    for piece in 0..pieces {
        let sent = queue
            .upload(filled(&pool, &bytes(piece, 77)), memory.slice(piece * 96..piece * 96 + 77))
            .unwrap();
        if piece % 3 == 0 {
            kept.push((piece, sent));
        }
    }
    for (piece, sent) in kept {
        assert!(*sent.wait().unwrap() == *bytes(piece, 77));
    }
    queue.synchronize().unwrap();
    let all = read(on, &pool, &memory);
    for piece in 0..pieces {
        let at = piece * 96;
        assert!(all[at..at + 77] == bytes(piece, 77), "piece {piece}");
        assert!(all[at + 77..at + 96] == [7; 19], "beside piece {piece}");
    }
    drop(queue);
    all_back(on, &pool);
}

pub(super) fn order(on: &Subject) {
    let (pool, queue, stream) = (on.pool(16 << 20), on.device.copy_queue().unwrap(), on.stream());
    let (memory, copy) = (on.alloc(200_000), on.alloc(200_000));
    for round in 0..10 {
        let sent = bytes(round, 200_000);
        // A stream's work after a copy of the queue's.
        let flight = queue.upload(filled(&pool, &sent), &memory).unwrap();
        stream.wait_for_copy(&flight).unwrap();
        drop(stream.copy(&memory, &copy).unwrap());
        drop(flight);
        // A copy of the queue's after a stream's work.
        queue.wait_for(&stream).unwrap();
        let landing = pool.checkout(200_000).unwrap();
        let back = queue.download(&copy, landing).unwrap().wait().unwrap();
        assert!(*back == *sent, "round {round}");
        // And copies of streams before work of other streams, by their handles.
        let other = on.stream();
        let flight = stream.upload(filled(&pool, &bytes(round + 50, 200_000)), &memory).unwrap();
        other.wait_for_copy(&flight).unwrap();
        assert!(fetch(&pool, &other, &memory) == bytes(round + 50, 200_000));
        drop(flight.wait().unwrap());
        let done = queue.upload(filled(&pool, &sent), &memory).unwrap();
        while !done.is_done().unwrap() {
            on.pump();
        }
        other.wait_for_copy(&done).unwrap();
    }
    if let Some(other) = &on.other {
        let flight = queue.upload(filled(&pool, b"here"), &memory).unwrap();
        let error = other.stream().unwrap().wait_for_copy(&flight);
        // It may be complete already: then there is nothing to wait for.
        assert!(matches!(error, Ok(()) | Err(Error::WrongDevice { .. })), "{error:?}");
        let error = queue.wait_for(&other.stream().unwrap()).unwrap_err();
        assert!(matches!(error, Error::WrongDevice { .. }), "{error}");
    }
    // Memory in a stream's order is there for the queue.
    for round in 0..10 {
        let ordered = stream.alloc(5000).unwrap();
        let sent = bytes(round, 5000);
        drop(queue.upload(filled(&pool, &sent), &ordered).unwrap().wait().unwrap());
        assert!(fetch(&pool, &stream, &ordered) == sent);
    }
    drop((queue, stream));
    all_back(on, &pool);
}

/// Copies to the same bytes, and to overlapping ones: the bytes there afterwards are those of whole copies.
pub(super) fn overlaps(on: &Subject) {
    let (pool, queue) = (on.pool(8 << 20), on.device.copy_queue().unwrap());
    let memory = on.alloc(64 << 10);
    let sent: Vec<_> = (0..200_usize)
        .map(|i| {
            let at = i * 7 % 40 * 100;
            (at, queue.upload(filled(&pool, &[i as u8; 1000]), memory.slice(at..at + 1000)).unwrap())
        })
        .collect();
    for (_, sent) in sent {
        drop(sent.wait().unwrap());
    }
    let last = queue.upload(filled(&pool, &[222; 3000]), memory.slice(500..3500)).unwrap();
    last.wait().unwrap();
    let all = read(on, &pool, &memory);
    assert!(all[500..3500] == [222; 3000]);
    drop(queue);
    all_back(on, &pool);
}

pub(super) fn refusals(on: &Subject) {
    let (pool, queue, stream) = (on.pool(4 << 20), on.device.copy_queue().unwrap(), on.stream());
    let memory = on.alloc(1000);
    let sent = bytes(0, 2000);
    let full = || filled(&pool, &sent);
    let small = Error::TooSmall { need: 2000, have: 1000 };
    assert_eq!(refusal(queue.upload(full(), &memory), &sent), small);
    let outside = |start, end, len| Error::OutOfRange { start, end, len };
    assert_eq!(refusal(queue.try_upload(full(), memory.slice(10..1001)), &sent), outside(10, 1001, 1000));
    assert_eq!(refusal(queue.upload_part(full(), 1999..2001, &memory), &sent), outside(1999, 2001, 2000));
    assert_eq!(refusal(queue.upload_part(full(), 5..5, &memory), &sent), Error::Empty);
    assert_eq!(refusal(queue.upload(pool.checkout(8).unwrap(), &memory), &[]), Error::Empty);
    let error = refusal(queue.download(&memory, pool.checkout(999).unwrap()), &[]);
    assert_eq!(error, Error::TooSmall { need: 1000, have: 999 });
    let error = queue.download(&memory, pool.checkout_on(&stream, 1000).unwrap()).unwrap_err();
    assert!(matches!(error, SubmitError { error: Error::WrongStream, buffer: Some(_) }), "{error:?}");
    drop(error);
    if let Some(other) = &on.other {
        let wrong = |error: Error| assert!(matches!(error, Error::WrongDevice { .. }), "{error}");
        let far = other.alloc(5000).unwrap();
        wrong(refusal(queue.upload(full(), &far), &sent));
        wrong(refusal(queue.download(&far, full()), &sent));
        // The pool does not serve the other device.
        wrong(refusal(other.copy_queue().unwrap().upload(full(), &far), &sent));
        wrong(refusal(other.copy_queue().unwrap().try_download(&far, full()), &sent));
    }
    // Closed.
    drop(queue.upload(filled(&pool, &sent[..1000]), &memory).unwrap());
    queue.shutdown(HANG).unwrap();
    assert!(read(on, &pool, &memory) == sent[..1000], "what was pushed before is done");
    assert_eq!(refusal(queue.upload(full(), on.alloc(2000)), &sent), Error::QueueClosed);
    assert_eq!(refusal(queue.try_download(&memory, full()), &sent), Error::QueueClosed);
    drop((queue, stream));
    all_back(on, &pool);
}

/// A queue that takes few copies: a caller that does not wait is told so, one that waits gets through, and nothing is
/// lost.
pub(super) fn depth(on: &Subject) {
    let (pool, queue) =
        (on.pool(8 << 20), on.device.copy_queue_with(QueueOptions::new().depth(3).threads(1)).unwrap());
    let memory = on.alloc(1 << 20);
    let (mut sent, mut full) = (Vec::new(), 0);
    let one = bytes(1, 100_000);
    for _ in 0..300 {
        match queue.try_upload(filled(&pool, &one), memory.slice(..100_000)) {
            Ok(flight) => sent.push(flight),
            Err(SubmitError { error: Error::QueueFull { depth: 3 }, buffer: Some(buf) }) => {
                assert!(*buf == *one);
                full += 1;
                if full == 20 {
                    break;
                }
            }
            Err(error) => panic!("{error:?}"),
        }
        sent.retain(|flight| !flight.is_done().unwrap());
        assert!(sent.len() <= 3);
    }
    drop(sent);
    for round in 0..50 {
        let at = round * 4096;
        drop(queue.upload(filled(&pool, &bytes(round, 4096)), memory.slice(at..at + 4096)).unwrap());
    }
    queue.synchronize().unwrap();
    let all = read(on, &pool, &memory);
    for round in 0..50 {
        assert!(all[round * 4096..][..4096] == bytes(round, 4096), "piece {round}");
    }
    drop(queue);
    all_back(on, &pool);
}

pub(super) fn awaited(on: &Subject) {
    let (pool, queue) = (on.pool(1 << 20), on.device.copy_queue().unwrap());
    let memory = on.alloc(50_000);
    for round in 0..30 {
        let buf = filled(&pool, &bytes(round, 50_000));
        let buf = block_on(on, queue.upload(buf, &memory).unwrap()).unwrap();
        let back = block_on(on, queue.download(&memory, buf).unwrap()).unwrap();
        assert!(*back == *bytes(round, 50_000));
        // Polled once and dropped: the waker is taken back.
        let mut flight = queue.upload(back, &memory).unwrap();
        let _ = Pin::new(&mut flight).poll(&mut Context::from_waker(Waker::noop()));
        drop(flight);
    }
    let shared = Arc::new(filled(&pool, &bytes(1, 20_000)));
    // One buffer feeds several copies.
    let several: Vec<_> =
        (0..3).map(|i| queue.upload(shared.clone(), memory.slice(i * 10_000..)).unwrap()).collect();
    for flight in several {
        drop(block_on(on, flight).unwrap());
    }
    let all = read(on, &pool, &memory);
    assert!(all[20_000..40_000] == bytes(1, 20_000));
    drop((queue, shared));
    all_back(on, &pool);
}

/// Handles that are never dropped. In here, and not by `mem::forget`, so that a search for leaks finds other leaks
/// only.
static FORGOTTEN: Mutex<Vec<InFlight<PinnedBuf>>> = Mutex::new(Vec::new());

/// Everything that belongs to a queue is dropped in any order, with copies pushed and under way.
pub(super) fn drops(on: &Subject) {
    for order in 0..6 {
        let pool = on.pool(8 << 20);
        let memory = on.alloc(64 << 10);
        let queue = on.device.copy_queue().unwrap();
        let flights: Vec<_> = (0..64)
            .map(|i| {
                queue.upload(filled(&pool, &bytes(i, 1000)), memory.slice(i * 1024..i * 1024 + 1000)).unwrap()
            })
            .collect();
        match order {
            0 => drop((queue, flights)),
            1 => drop((flights, queue)),
            2 => {
                drop(queue);
                for (i, flight) in flights.into_iter().enumerate() {
                    assert!(*flight.wait().unwrap() == *bytes(i, 1000));
                }
            }
            3 => {
                let clone = queue.clone();
                drop((queue, flights));
                clone.synchronize().unwrap();
            }
            4 if on.device.name().starts_with("host") => {
                // A handle is leaked: what it names is leaked with it, and nothing else is harmed. (The stand-in driver
                // would report what is leaked.)
                let mut flights = flights;
                FORGOTTEN.lock().unwrap().extend(flights.pop());
                drop((flights, queue));
                continue;
            }
            _ => {
                let check = pool.clone();
                drop((pool, memory, flights));
                drop(queue);
                all_back(on, &check);
                continue;
            }
        }
        let since = std::time::Instant::now();
        while pool.stats().checked_out_bytes + pool.stats().in_flight_bytes > 0 {
            assert!(since.elapsed() < HANG);
            on.pump();
        }
        let all = read(on, &pool, &memory);
        for i in 0..64 {
            assert!(all[i * 1024..i * 1024 + 1000] == bytes(i, 1000), "order {order}, piece {i}");
        }
        all_back(on, &pool);
    }
}

pub(super) fn threads(on: &Subject) {
    if !on.has_threads() {
        return;
    }
    // Several threads submit where the first has too much, however few processors there are.
    for submitters in [1, 3] {
        threads_through(on, on.device.copy_queue_with(QueueOptions::new().threads(submitters)).unwrap());
    }
}

fn threads_through(on: &Subject, queue: CopyQueue) {
    const THREADS: usize = 6;
    const EACH: usize = 400;
    let pool = on.pool(4 << 20);
    let memories: Vec<_> = (0..THREADS).map(|_| on.alloc(EACH * 512)).collect();
    std::thread::scope(|scope| {
        for (t, memory) in memories.iter().enumerate() {
            let (pool, queue) = (pool.clone(), queue.clone());
            scope.spawn(move || {
                let mut last = None;
                for i in 0..EACH {
                    let range = || memory.slice(i * 512..i * 512 + 500);
                    let sent = bytes(t * EACH + i, 500);
                    let flight = queue.upload(filled(&pool, &sent), range()).unwrap();
                    match i % 5 {
                        0 => last = Some((flight, sent, range())),
                        1 => {
                            let buf = flight.wait().unwrap();
                            let back = queue.download(range(), buf).unwrap().wait().unwrap();
                            assert!(*back == *sent, "thread {t}, copy {i}");
                        }
                        2 => drop(block_on(on, flight).unwrap()),
                        _ => drop(flight),
                    }
                    if let Some((flight, sent, range)) = last.take_if(|_| i % 10 == 9) {
                        assert!(*flight.wait().unwrap() == *sent);
                        let back = queue.download(range, pool.checkout(500).unwrap()).unwrap();
                        assert!(*block_on(on, back).unwrap() == *sent);
                    }
                }
            });
        }
    });
    queue.synchronize().unwrap();
    for (t, memory) in memories.iter().enumerate() {
        let all = read(on, &pool, memory);
        for i in 0..EACH {
            assert!(all[i * 512..i * 512 + 500] == bytes(t * EACH + i, 500), "thread {t}, copy {i}");
        }
    }
    drop(queue);
    all_back(on, &pool);
}
