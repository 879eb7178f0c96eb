//! Transfers by a pool that others hold: what is free in shorter pieces than a chunk is used, and a deadline ends what
//! finds none.

use std::sync::mpsc;
use std::time::{Duration, Instant};

use pinpool::copier::{FileSink, FileSource};
use pinpool::host::HostConfig;
use pinpool::{Copier, DeviceSlice, Error, PinnedBuf, Request, Waited};

use super::{HANG, Rig, block_on, file_of, pattern, told, until};

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
    let mut all: Vec<PinnedBuf> = of(pages).collect();
    all.extend(of(1));
    assert_eq!(rig.pool.stats().free_bytes, 0);
    all
}

type Form = fn(&Copier, &DeviceSlice, &[u8]) -> Result<(), Error>;

/// Each kind of call, which puts the bytes there or gets them back.
const FORMS: [(&str, Form); 10] = [
    ("upload_slice", |copier, memory, bytes| copier.upload_slice(bytes, memory)),
    ("upload", |copier, memory, bytes| {
        copier.upload(bytes.to_vec(), memory)?.wait()?;
        Ok(())
    }),
    ("upload in a task", |copier, memory, bytes| {
        block_on(copier.upload(bytes.to_vec(), memory)?)?;
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
    ("download_slice", |copier, memory, bytes| {
        let mut back = vec![0; BYTES];
        copier.download_slice(memory, &mut back).map(|()| assert!(back == bytes))
    }),
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
    let bytes = pattern(BYTES, 1);
    let memory = rig.device.alloc(BYTES).unwrap();
    let stream = rig.device.stream().unwrap();
    stream.upload_blocking(&bytes, &memory).unwrap();
    std::thread::scope(|scope| {
        for (name, form) in FORMS {
            let (done, is_done) = mpsc::channel::<()>();
            let (stream, copier, memory, bytes) = (&stream, &copier, &memory, &bytes);
            scope.spawn(move || {
                if !name.starts_with("download") {
                    stream.upload_blocking(&vec![0; BYTES], memory).unwrap();
                }
                let said = form(copier, memory, bytes);
                // Without the copier, which is what is tested.
                let mut back = vec![0; BYTES];
                stream.download_blocking(memory, &mut back).unwrap();
                assert!(said.is_err() || back == *bytes, "{name}");
                ended(name, said);
                stream.upload_blocking(bytes, memory).unwrap();
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
        let mut number = 0;
        all.retain(|_| {
            number += 1;
            number % 3 > 0
        });
        let stats = rig.pool.stats();
        assert!(stats.largest_free_bytes < CHUNK && stats.free_bytes > 1 << 20, "{stats:?}");
        all_forms_end(&rig, &copier);
        // What the copier tries is no checkout of the program's that was refused.
        let now = rig.pool.stats();
        assert_eq!((now.refused, now.errors), (stats.refused, stats.errors));
        drop(all);
        rig.all_is_back();
    }
}

#[test]
fn one_short_piece_that_comes_back_moves_every_transfer() {
    let rig = Rig::new(HostConfig::new(), 4 << 20);
    let copier = copier(&rig);
    let mut all = taken(&rig, 16);
    let piece = all.swap_remove(all.len() / 2);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            until("the first form waits in the pool's queue", || rig.pool.stats().waiting > 0);
            drop(piece);
        });
        all_forms_end(&rig, &copier);
    });
    drop(all);
    rig.all_is_back();
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
    rig.all_is_back();
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
    // A single chunk.
    let (tell, source) = told(1000, 0);
    let blocked = copier.upload(source, &memory).unwrap();
    until("it has a segment", || rig.pool.stats().free_bytes <= 16 * PAGE);
    all_forms_end(&rig, &copier);
    drop(tell);
    blocked.wait().unwrap();
    drop(all);
    rig.all_is_back();
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
    rig.all_is_back();
}

#[test]
fn a_deadline_says_what_was_waited_for() {
    let rig = Rig::plain();
    let copier = rig.builder().threads(2).build().unwrap();
    let in_time = copier.with_timeout(SOON);
    let memory = rig.device.alloc(BYTES).unwrap();
    // The rate.
    let slow = rig.builder().threads(2).rate(1).build().unwrap();
    let waited = late(slow.with_timeout(SOON).upload_slice(&vec![2; BYTES], &memory));
    assert!(waited.to_string().contains("bytes in memory"), "{waited}");
    // A source that does not return is waited for: it is lent, and has its place in a segment.
    let (tell, source) = told(BYTES, 0);
    let slow = in_time.upload(source, &memory).unwrap();
    let refused = slow.wait_timeout(5 * SOON).unwrap_err();
    let slow = refused.buffer.expect("it is not over");
    drop(tell);
    let refused = slow.wait().unwrap_err();
    assert!(refused.buffer.is_some(), "the source comes back");
    let waited = late(Err(refused.error));
    assert!(waited.to_string().contains("what is told had arrived"), "{waited}");
    assert!(waited.to_string().contains("a call of which has not returned"), "{waited}");
    rig.all_is_back();
}

#[test]
fn a_deadline_ends_what_nobody_waits_for() {
    let rig = Rig::new(HostConfig::new(), 4 << 20);
    let copier = copier(&rig);
    let memory = rig.device.alloc(BYTES).unwrap();
    let all = taken(&rig, 16);
    let (tell, source) = told(BYTES, 0);
    drop(copier.with_timeout(SOON).upload(source, &memory).unwrap());
    let since = Instant::now();
    until("the source is dropped", || tell.send(()).is_err());
    assert!(since.elapsed() >= SOON / 2);
    // What waits behind it goes on.
    drop(all);
    copier.upload_slice(&vec![3; BYTES], &memory).unwrap();
    rig.all_is_back();
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
    let stream = rig.device.stream().unwrap();
    copier.with_timeout(SOON).upload_slices(&[(&[7; 4096], memory.slice(..).unwrap())]).unwrap();
    let mut back = vec![0; 4096];
    stream.download_blocking(memory.slice(..4096), &mut back).unwrap();
    assert_eq!(back, [7; 4096]);
}

/// The bound is for requests of the program's own.
#[test]
fn a_bounded_queue_refuses_no_transfer() {
    let device = pinpool::Device::open("host").unwrap();
    let builder = pinpool::Pool::builder(&device).capacity(1 << 20).unpinned(pinpool::Unpinned::Allow);
    let pool = builder.max_waiting(0).build().unwrap();
    let copier = Copier::builder(&pool, &device).build().unwrap();
    let memory = device.alloc(BYTES).unwrap();
    let bytes = pattern(BYTES, 3);
    for (_, form) in FORMS {
        // A worker that found no chunk for its segment returns it shortly after a transfer has ended.
        let mut all = None;
        until("all is free", || {
            all = pool.checkout((1 << 20) - PAGE).ok();
            all.is_some()
        });
        std::thread::scope(|scope| {
            let ended = scope.spawn(|| form(&copier, &memory, &bytes));
            until("it waits", || pool.stats().waiting > 0 || ended.is_finished());
            drop(all);
            ended.join().unwrap().unwrap();
        });
    }
}
