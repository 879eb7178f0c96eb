//! Transfers by a pool that others hold: what is free in shorter pieces than a chunk is used, and a deadline ends what
//! finds none; and who has room when others wait.

use std::sync::mpsc;

use pinpool::{PinnedBuf, Pool, Request, Unpinned, Waited};

use super::*;
use crate::support::Random;

const PAGE: usize = 4096;
const CHUNK: usize = 256 << 10;
const BYTES: usize = (1 << 20) + 77;

/// A copier of chunks that are longer than the pieces below.
fn copier(rig: &Rig) -> Copier {
    rig.builder().chunk(CHUNK).share(2 << 20).build().unwrap()
}

/// All memory of a pool, in buffers that lie side by side, so that each that is given back is a piece of its own.
fn taken(rig: &Rig, pages: usize) -> Vec<PinnedBuf> {
    let of = |pages: usize| {
        let request = Request::new(pages * PAGE - 32).align(PAGE).long_lived();
        std::iter::from_fn(move || rig.pool.try_checkout(request).ok())
    };
    rig.pool.wait_pinned(None).unwrap();
    let mut all: Vec<PinnedBuf> = of(pages).collect();
    all.extend(of(1));
    assert_eq!(rig.pool.stats().free_bytes, 0);
    all
}

type Form = fn(&Copier, &DeviceSlice, &[u8]) -> Result<(), Error>;

/// Each kind of call, which puts the bytes there or gets them back.
const FORMS: [(&str, Form); 7] = [
    ("upload", |copier, memory, bytes| {
        copier.upload(bytes.to_vec(), memory)?.wait()?;
        Ok(())
    }),
    ("upload_slices", |copier, memory, bytes| {
        let (most, rest) = bytes.split_at(BYTES / 1000 * 1000);
        let mut pieces = vec![(rest, memory.slice(most.len()..)?)];
        for (n, piece) in most.chunks(1000).enumerate() {
            pieces.push((piece, memory.slice(n * 1000..)?));
        }
        copier.upload_slices(&pieces)
    }),
    ("upload of a file", |copier, memory, bytes| {
        let file = file_of(bytes);
        file.as_file().sync_all().unwrap();
        copier.upload(FileSource::open(file.path())?, memory)?.wait()?;
        Ok(())
    }),
    ("upload_read", |copier, memory, bytes| copier.upload_read(&mut &bytes[..], memory).map(drop)),
    ("download_slices", |copier, memory, bytes| {
        let mut back = vec![0; BYTES];
        let mut pieces = Vec::new();
        for (n, piece) in back.chunks_mut(1000).enumerate() {
            pieces.push((memory.slice(n * 1000..n * 1000 + piece.len())?, piece));
        }
        copier.download_slices(&mut pieces).map(|()| assert!(back == bytes))
    }),
    ("download_write", |copier, memory, bytes| {
        let mut back = Vec::new();
        copier.download_write(memory, &mut back).map(|_| assert!(back == bytes))
    }),
    ("download", |copier, memory, bytes| {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("out");
        copier.download(memory, FileSink::create(&path)?)?.wait()?;
        assert!(std::fs::read(path).unwrap() == bytes);
        Ok(())
    }),
];

/// Runs every form, one after the other, and looks at how it ended. A form that does not end ends the test.
fn every_form(rig: &Rig, copier: &Copier, ended: fn(&str, Result<(), Error>)) {
    let (memory, stream) = (rig.device.alloc(BYTES).unwrap(), rig.device.stream().unwrap());
    std::thread::scope(|scope| {
        for (n, (name, form)) in FORMS.into_iter().enumerate() {
            let (done, is_done) = mpsc::channel::<()>();
            let (stream, copier, memory) = (&stream, &copier, &memory);
            scope.spawn(move || {
                let bytes = pattern(BYTES, n as u64 + 1);
                if name.starts_with("download") {
                    stream.upload_blocking(&bytes, memory).unwrap();
                }
                let said = form(copier, memory, &bytes);
                // Without the copier, which is what is tested.
                let mut back = vec![0; BYTES];
                stream.download_blocking(memory, &mut back).unwrap();
                assert!(said.is_err() || back == bytes, "{name}");
                ended(name, said);
                drop(done);
            });
            if is_done.recv_timeout(HANG) == Err(mpsc::RecvTimeoutError::Timeout) {
                // The scope would wait for it.
                eprintln!("{name} does not end: {:?}", rig.pool.stats());
                std::process::abort();
            }
        }
    });
}

fn all_forms_end(rig: &Rig, copier: &Copier) {
    every_form(rig, copier, |name, said| said.unwrap_or_else(|error| panic!("{name}: {error}")));
}

#[test]
fn what_is_free_in_pieces_shorter_than_a_chunk_moves_every_transfer() {
    let rig = Rig::new(HostConfig::new(), 4 << 20);
    let copier = copier(&rig);
    for pages in [5, 16, 50] {
        let mut all = taken(&rig, pages);
        // Every third of them is free.
        let mut number = 0..;
        all.retain(|_| number.next().is_some_and(|number| number % 3 < 2));
        let stats = rig.pool.stats();
        assert!(stats.largest_free_bytes < CHUNK && stats.free_bytes > 1 << 20, "{stats:?}");
        all_forms_end(&rig, &copier);
        // What the copier tries is no checkout of the program's that was refused.
        let now = rig.pool.stats();
        assert_eq!(
            (now.exhausted, now.impossible, now.errors),
            (stats.exhausted, stats.impossible, stats.errors)
        );
        drop(all);
        rig.all_is_back();
    }
}

/// The bound of the pool's queue is for requests of the program's own.
#[test]
fn one_short_piece_that_comes_back_moves_every_transfer_whatever_the_queues_bound() {
    let mut rig = Rig::new(HostConfig::new(), 1 << 20);
    let builder = Pool::builder(&rig.device).capacity(4 << 20).unpinned(Unpinned::Allow);
    rig.pool = builder.max_waiting(0).build().unwrap();
    let (copier, bytes, memory) = (copier(&rig), pattern(BYTES, 3), rig.device.alloc(BYTES).unwrap());
    rig.device.stream().unwrap().upload_blocking(&bytes, &memory).unwrap();
    let memory = memory.slice(..).unwrap();
    let mut all = taken(&rig, 16);
    let mut piece = Some(all.swap_remove(all.len() / 2));
    for (name, form) in FORMS {
        std::thread::scope(|scope| {
            let ended = scope.spawn(|| form(&copier, &memory, &bytes));
            until("it waits", || rig.pool.stats().waiting > 0 || ended.is_finished());
            drop(piece.take());
            ended.join().unwrap().unwrap_or_else(|error| panic!("{name}: {error}"));
        });
        // A worker that found no chunk for its segment returns it shortly after a transfer has ended.
        until("the piece is back", || {
            piece = rig.pool.try_checkout(Request::new(16 * PAGE - 32).align(PAGE)).ok();
            piece.is_some()
        });
    }
    drop((piece, all));
}

/// When the pool has long pieces again, chunks are long again: short ones cost speed.
#[test]
fn a_copier_that_has_used_short_pieces_goes_back_to_long_ones() {
    let rig = Rig::new(HostConfig::new(), 4 << 20);
    let copier = copier(&rig);
    let bytes = pattern(8 << 20, 2);
    let memory = rig.device.alloc(bytes.len()).unwrap();
    let chunks = |copier: &Copier| {
        let before = copier.stats().chunks;
        copier.upload_slice(&bytes, &memory).unwrap();
        copier.stats().chunks - before
    };
    let usual = chunks(&copier);
    let mut all = taken(&rig, 16);
    all.swap_remove(all.len() / 2);
    assert!(chunks(&copier) > 3 * usual);
    drop(all);
    assert!(chunks(&copier) < 2 * usual);
}

/// What is blocked has a segment, so the copier is not without any.
#[test]
fn a_blocked_source_keeps_no_other_transfer_from_short_pieces() {
    let rig = Rig::new(HostConfig::new(), 4 << 20);
    let copier = copier(&rig);
    let memory = rig.device.alloc(BYTES).unwrap();
    let mut all = taken(&rig, 16);
    let pieces = all.len() / 2;
    drop((all.swap_remove(pieces), all.swap_remove(pieces / 2)));
    let blocks = Blocks::default();
    let blocked = copier.upload(blocks.source(1000, 0), &memory).unwrap();
    until("it has a segment", || blocks.calls() > 0);
    all_forms_end(&rig, &copier);
    blocks.go_on();
    blocked.wait().unwrap();
    drop(all);
}

// --- deadlines -------------------------------------------------------------------------------------------------------

const SOON: Duration = Duration::from_millis(30);

/// The error of a transfer whose deadline has passed.
fn late(said: Result<(), Error>) -> Waited {
    match said {
        Err(Error::Timeout(waited)) => {
            assert!(waited.time >= SOON, "{waited}");
            waited
        }
        other => panic!("{other:?}"),
    }
}

#[test]
fn a_deadline_ends_every_transfer_that_finds_no_memory() {
    let rig = Rig::new(HostConfig::new(), 4 << 20);
    let copier = copier(&rig);
    let all = taken(&rig, 16);
    // Pieces without bytes need none.
    let place = rig.device.alloc(1).unwrap().slice(..).unwrap();
    copier.with_timeout(SOON).upload_slices(&[(&[], place.clone()), (&[], place)]).unwrap();
    every_form(&rig, &copier.with_timeout(SOON), |name, said| {
        let waited = late(said);
        let text = waited.to_string();
        let shortage = waited.shortage.expect("it says what there was in the pool");
        assert_eq!((shortage.free, shortage.largest), (0, 0), "{name}: {text}");
        for word in ["of 1.0 MiB (", "a segment", &shortage.pool] {
            assert!(text.contains(word), "{name}: {text} lacks {word}");
        }
    });
    // By the thread that finds no work any more.
    until("its place in the queue is given up", || rig.pool.stats().waiting == 0);
    drop(all);
    // Nothing is lost, and a deadline that does not pass changes nothing.
    rig.all_is_back();
    all_forms_end(&rig, &copier.with_timeout(10 * HANG));
}

#[test]
fn a_deadline_says_what_was_waited_for() {
    let rig = Rig::plain();
    let copier = rig.builder().threads(2).build().unwrap();
    let in_time = copier.with_timeout(SOON);
    let memory = rig.device.alloc(BYTES).unwrap();
    let slow = rig.builder().threads(2).rate(1).build().unwrap();
    let waited = late(slow.with_timeout(SOON).upload_slice(&vec![2; BYTES], &memory));
    assert!(waited.to_string().contains("bytes in memory"), "{waited}");
    // A source that does not return is waited for: it is lent, and has its place in a segment.
    let blocks = Blocks::default();
    let slow = in_time.upload(blocks.source(BYTES, 0), &memory).unwrap();
    let refused = slow.wait_timeout(5 * SOON).unwrap_err();
    let slow = refused.buffer.expect("it is not over");
    blocks.go_on();
    let refused = slow.wait().unwrap_err();
    assert!(refused.buffer.is_some(), "the source comes back");
    let waited = late(Err(refused.error));
    assert!(waited.to_string().contains("what is held up had arrived"), "{waited}");
    assert!(waited.to_string().contains("a call of which has not returned"), "{waited}");
}

#[test]
fn a_deadline_ends_what_nobody_waits_for() {
    let rig = Rig::new(HostConfig::new(), 4 << 20);
    let copier = copier(&rig);
    let memory = rig.device.alloc(BYTES).unwrap();
    let all = taken(&rig, 16);
    let source: Arc<Vec<u8>> = Arc::new(vec![2; BYTES]);
    drop(copier.with_timeout(SOON).upload(source.clone(), &memory).unwrap());
    let since = Instant::now();
    until("the source is dropped", || Arc::strong_count(&source) == 1);
    assert!(since.elapsed() >= SOON / 2);
    // What waits behind it goes on.
    drop(all);
    copier.upload_slice(&vec![3; BYTES], &memory).unwrap();
}

/// What the device has begun cannot be called back.
#[test]
fn chunks_under_way_at_the_deadline_are_waited_for() {
    let slow = HostConfig::new().late(Duration::from_millis(100), 11);
    let rig = Rig::new(slow, 16 << 20);
    let copier = rig.builder().depth(1).build().unwrap();
    let memory = rig.device.alloc(BYTES).unwrap();
    let begun = late(copier.with_timeout(SOON).upload_slice(&vec![1; BYTES], &memory));
    assert!(begun.to_string().contains("under way"), "{begun}");
    let stats = rig.pool.stats();
    assert_eq!(stats.in_flight_bytes, 0, "when the call returns: {stats:?}");
    rig.all_is_back();
    // The last chunk is on its way when the deadline passes, and all bytes arrive.
    copier.with_timeout(SOON).upload_slices(&[(&[7; 4096], memory.slice(..).unwrap())]).unwrap();
    assert_eq!(downloaded(&copier, memory.slice(..4096)), [7; 4096]);
}

// --- in the queue ----------------------------------------------------------------------------------------------------

/// A copier waits in the pool's queue in one place, whichever transfer and worker asks.
#[test]
fn a_cancelled_transfer_leaves_its_place_in_the_pools_queue_to_another() {
    let rig = Rig::new(HostConfig::new(), 2 << 20);
    let copier = rig.builder().threads(4).build().unwrap();
    let bytes = pattern(1 << 20, 3);
    let memory = [0, 1].map(|_| rig.device.alloc(1 << 20).unwrap());
    let mut all = rig.emptied();
    let first = copier.download(&memory[0], sink(|_, _: &[u8]| Ok(()))).unwrap();
    until("it waits like any other", || rig.pool.stats().waiting > 0);
    let second = copier.upload(bytes.clone(), &memory[1]).unwrap();
    // Several times as long as a worker sleeps.
    std::thread::sleep(Duration::from_millis(50));
    let stats = rig.pool.stats();
    assert_eq!((stats.waiting, stats.timeouts), (1, 0), "one request, however many threads");
    first.cancel();
    // Enough for one segment is enough.
    all.truncate(all.len() / 2);
    assert!(second.wait_timeout(HANG).is_ok(), "no worker is in the pool's queue any more");
    assert!(matches!(first.wait().unwrap_err().error, Error::Cancelled { done: 0, .. }));
    drop(all);
    assert!(downloaded(&copier, &memory[1]) == bytes);
}

/// A call does not take the last two segments of the pool: its reader may wait for a transfer that needs the
/// second one.
#[test]
fn a_reader_leaves_a_segment_to_the_transfer_that_it_waits_for() {
    // The first copy is not complete when the second segment is filled.
    let rig = Rig::new(HostConfig::new().late(Duration::from_millis(20), 1), 2 << 20);
    let copier = rig.copier();
    let (bytes, memory) = (pattern(500_000, 4), [0, 1].map(|_| rig.device.alloc(500_000).unwrap()));
    rig.pool.wait_pinned(None).unwrap();
    let segment = Request::new(copier.stats().chunk + (12 << 10)).align(4096);
    let mut whole: Vec<_> = std::iter::from_fn(|| rig.pool.try_checkout(segment).ok()).collect();
    let _rest = rig.emptied();
    whole.truncate(whole.len() - 2);
    let mut calls = 0;
    let mut second = reader(|into| {
        calls += 1;
        if calls == 2 {
            let load = copier.upload(bytes.clone(), &memory[0]).unwrap();
            assert!(load.wait_timeout(HANG).is_ok(), "the call has both");
        }
        into.fill(7);
        Ok(into.len())
    });
    copier.upload_read(&mut second, &memory[1]).unwrap();
    assert!(downloaded(&copier, &memory[0]) == bytes);
}

#[test]
fn who_waits_for_the_pool_holds_neither_the_wire_nor_the_only_thread() {
    let rig = Rig::plain();
    let bytes = pattern(200_000, 6);
    let memory = [0, 1, 2].map(|_| rig.device.alloc(200_000).unwrap());
    for threads in [1, 3] {
        let copier = rig.builder().threads(threads).depth(1).build().unwrap();
        copier.upload_slice(&bytes, &memory[0]).unwrap();
        rig.all_is_back();
        let mut pinned = rig.pool.checkout(200_000).unwrap();
        pinned.extend_from_slice(&bytes);
        let all = rig.emptied();
        let file = file_of(&[]);
        let down = copier.download(&memory[0], FileSink::create(file.path()).unwrap()).unwrap();
        let up = source("sevens", 200_000, |_, into: &mut Fill<'_>| {
            into.push(&vec![7; into.remaining()]);
            Ok(())
        });
        let up = copier.upload(up, &memory[2]).unwrap();
        until("they wait for the pool", || rig.pool.stats().waiting == 1);
        let plain = copier.upload_pages(vec![(pinned, memory[1].slice(..).unwrap())]).unwrap();
        assert!(plain.wait_timeout(HANG).is_ok(), "it needs no segment");
        assert!(!down.is_over() && !up.is_over());
        drop(all);
        assert!(down.wait_timeout(HANG).is_ok() && up.wait_timeout(HANG).is_ok());
        assert!(std::fs::read(file.path()).unwrap() == bytes);
    }
}

/// Each copier asks the pool in vain now and then, while transfers of its own end. A thread that has looked meanwhile
/// must not sleep for what the pool never gave.
#[test]
fn copiers_on_a_pool_with_room_for_a_few_chunks_all_go_on() {
    let rig = Rig::new(HostConfig::new(), 400_000);
    let until = Instant::now() + Duration::from_secs(1);
    std::thread::scope(|scope| {
        for number in 0..6_u64 {
            let rig = &rig;
            scope.spawn(move || {
                let builder = rig.builder().threads(1 + number as usize % 3).share(400_000);
                let bulk = builder.build().unwrap();
                let urgent = bulk.with_priority(Priority::Foreground);
                let mut random = Random::new(number);
                while Instant::now() < until {
                    let len = 1 + random.below(500_000);
                    let memory = rig.device.alloc(len).unwrap();
                    let copier = if random.one_in(4) { &urgent } else { &bulk };
                    if random.one_in(2) {
                        drop(copier.upload(vec![1; len], &memory).unwrap());
                    } else {
                        let back = copier.download(&memory, sink(|_, _: &[u8]| Ok(()))).unwrap();
                        assert!(back.wait_timeout(2 * HANG).is_ok(), "it does not move");
                    }
                }
            });
        }
    });
}
