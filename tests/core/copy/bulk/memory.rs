//! Bytes in memory, up and down, and what the caller's own thread reads and writes.

use std::sync::mpsc::channel;

use super::*;

#[test]
fn what_cannot_work_is_refused_and_gives_the_source_back() {
    let rig = Rig::plain();
    let copier = rig.copier();
    let memory = rig.device.alloc(100).unwrap();
    let says = |error: Error, word: &str| {
        assert!(matches!(&error, Error::Argument(text) if text.contains(word)), "{error}")
    };
    says(copier.upload_slice(&[], &memory).unwrap_err(), "nothing to copy");
    assert!(matches!(copier.upload_slice(&[0; 101], &memory), Err(Error::TooSmall { need: 101, have: 100 })));
    let refused = copier.upload(vec![1_u8; 101], &memory).unwrap_err();
    assert!(matches!(refused.error, Error::TooSmall { .. }) && refused.buffer == Some(vec![1; 101]));
    // The last one is in the last chunk that there is.
    let last = CopyRange::new(u64::MAX - 100, memory.slice(..50).unwrap());
    for range in [CopyRange::new(1, &memory), CopyRange::new(u64::MAX, &memory), last] {
        let refused = copier.upload(vec![1_u8; 50], vec![range]).unwrap_err();
        assert!(refused.buffer.is_some());
        says(refused.error, "range");
    }
    assert!(matches!(copier.download_slice(&memory, &mut [0; 99]), Err(Error::TooSmall { .. })));
}

#[test]
fn a_vector_keeps_its_length_until_all_is_there_and_its_bytes_beside_the_ranges() {
    let rig = Rig::late();
    let (copier, bytes, memory) = with(&rig, 3 << 20, 4);
    copier.upload_slice(&bytes, &memory).unwrap();
    let range =
        |at: u64, from: usize, len: usize| CopyRange::new(at, memory.slice(from..from + len).unwrap());
    let overlap = vec![range(0, 0, 100), range(50, 100, 100)];
    let refused = copier.download(overlap, vec![1, 2, 3]).unwrap_err();
    assert!(matches!(&refused.error, Error::Argument(text) if text.contains("overlap")), "{}", refused.error);
    let buffer = refused.buffer.unwrap();
    assert_eq!(buffer, [1, 2, 3]);
    assert!(buffer.capacity() < 150, "nothing was taken for it");
    // All of it would take seconds.
    let slow = rig.builder().rate(1 << 20).build().unwrap().with_timeout(Duration::ZERO);
    let apart = || vec![range(2, 0, 2 << 20), range((2 << 20) + 9, 2 << 20, 1 << 20)];
    let late = slow.download(apart(), vec![1, 2, 3]).unwrap().wait();
    assert_eq!(late.unwrap_err().buffer.unwrap().len(), 3);
    let cancelled = copier.download(apart(), vec![1, 2, 3]).unwrap();
    cancelled.cancel();
    match cancelled.wait() {
        Ok(back) => assert_eq!(back.len(), (3 << 20) + 9),
        Err(stopped) => assert_eq!(stopped.buffer.unwrap().len(), 3),
    }
    // It has zeros where no range is, and keeps what it had.
    copier.upload_slice(&[9; 10], &memory).unwrap();
    let range = |at: u64, len: usize| CopyRange::new(at, memory.slice(..len).unwrap());
    // Memory that it has already, with other bytes behind its end.
    let old = |len: usize| {
        let mut old = vec![7; 40];
        old.truncate(len);
        old
    };
    let got = |ranges, len| copier.download(ranges, old(len)).unwrap().wait().unwrap();
    assert_eq!(got(vec![range(6, 2), range(2, 2)], 0), [0, 0, 9, 9, 0, 0, 9, 9]);
    assert_eq!(got(vec![range(6, 2), range(2, 2)], 5), [7, 7, 9, 9, 7, 0, 9, 9]);
    assert_eq!(got(vec![range(6, 2), range(2, 2)], 9), [7, 7, 9, 9, 7, 7, 9, 9, 7]);
    assert_eq!(got(vec![range(3, 2)], 1), [7, 0, 0, 9, 9]);
}

// --- readers and writers ---------------------------------------------------------------------------------------------

#[test]
fn readers_and_writers_are_served_in_order() {
    let rig = Rig::late();
    let (copier, bytes, memory) = with(&rig, (2 << 20) + 333, 4);
    let mut left = &bytes[..];
    let mut slow = reader(|into| {
        let n = into.len().min(left.len()).min(7001);
        left.read(&mut into[..n])
    });
    assert_eq!(copier.upload_read(&mut slow, &memory).unwrap(), bytes.len() as u64);
    let mut back = Vec::new();
    assert_eq!(copier.download_write(&memory, &mut back).unwrap(), bytes.len() as u64);
    assert!(back == bytes);
    // More than there is room for.
    let mut long = &bytes[..];
    assert_eq!(copier.upload_read(&mut long, memory.slice(..70_000)).unwrap(), 70_000);
}

#[test]
fn a_reader_may_end_where_a_chunk_does() {
    let rig = Rig::plain();
    let copier = rig.copier();
    let chunk = copier.stats().chunk;
    let bytes = pattern(4 * chunk, 1);
    let memory = rig.device.alloc(1 << 20).unwrap();
    // (The first chunks of an upload may be shorter, each a power of two of pages.)
    for len in [0, 1, chunk / 8, chunk / 2, chunk, 2 * chunk, 3 * chunk + 1, 4 * chunk] {
        copier.upload_slice(&vec![0xa5; 1 << 20], &memory).unwrap();
        assert_eq!(copier.upload_read(&mut &bytes[..len], &memory).unwrap(), len as u64);
        let back = downloaded(&copier, &memory);
        assert!(back[..len] == bytes[..len] && back[len..].iter().all(|byte| *byte == 0xa5), "{len}");
    }
}

/// Each has segments of its own, and two together leave room for what their writers wait for: a download of
/// the same kind, and one to a sink.
#[test]
fn writers_of_two_downloads_may_wait_for_others() {
    for (priority, share) in
        [(Priority::Bulk, 300 << 10), (Priority::Foreground, 400 << 10), (Priority::Bulk, 1 << 20)]
    {
        let rig = Rig::plain();
        let copier = rig.builder().share(share).build().unwrap().with_priority(priority);
        let memory: Vec<_> = (0..3).map(|_| rig.device.alloc(2 << 20).unwrap()).collect();
        let bytes = pattern(2 << 20, 6);
        memory.iter().for_each(|memory| copier.upload_slice(&bytes, memory).unwrap());
        let (done, is_done) = channel();
        let threads: Vec<_> = (0..2)
            .map(|i| {
                let (from, other) = (memory[i].slice(..).unwrap(), memory[2].slice(..).unwrap());
                let (copier, done) = (copier.clone(), done.clone());
                std::thread::spawn(move || {
                    let mut waits = writer(|nth, bytes| {
                        if nth == 0 {
                            // All that the transfer may have has landed.
                            std::thread::sleep(Duration::from_millis(50));
                            assert_eq!(copier.download_write(&other, &mut io::sink()).unwrap(), 2 << 20);
                            done.send(downloaded(&copier, &other)).unwrap();
                        }
                        Ok(bytes.len())
                    });
                    copier.download_write(&from, &mut waits).unwrap();
                })
            })
            .collect();
        for _ in 0..2 {
            assert!(is_done.recv_timeout(HANG).expect("there is room for others") == bytes);
        }
        threads.into_iter().for_each(|thread| thread.join().unwrap());
    }
}
