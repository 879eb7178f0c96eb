//! Any lengths, any places, any pieces: what arrives is what was sent, where it was sent to, and nothing else is
//! touched.

use std::io::Write;

use crate::support::downloaded;
use pinpool::Copier;
use pinpool::copier::{CopyRange, FileSource, Reading};
use proptest::prelude::*;

use super::{Rig, pattern};

/// Bytes of the device memory and of the source that the cases use.
const ROOM: usize = 700_000;

#[derive(Clone, Debug)]
struct Case {
    threads: usize,
    chunk: usize,
    depth: usize,
    /// From, length, gap in front on the device, in the order in which they are named.
    pieces: Vec<(usize, usize, usize)>,
    reading: Option<usize>,
}

fn case() -> impl Strategy<Value = Case> {
    let len = prop_oneof![1..40_usize, 4090..4100_usize, 1..90_000_usize, 65_530..65_545_usize];
    let at = prop_oneof![Just(0), 0..20_000_usize, Just(4096), 0..600_000_usize];
    let piece = (at, len, prop_oneof![Just(0), 0..70_usize, 0..9000_usize]);
    (
        1..5_usize,
        16_384..60_000_usize,
        1..4_usize,
        prop::collection::vec(piece, 1..12),
        prop::option::of(0..3_usize),
    )
        .prop_map(|(threads, chunk, depth, pieces, reading)| Case {
            threads,
            chunk,
            depth,
            pieces,
            reading,
        })
}

thread_local! {
    static RIG: Rig = Rig::plain();
}

fn run(rig: &Rig, case: &Case) {
    let copier = Copier::builder(&rig.pool, &rig.device)
        .threads(case.threads)
        .chunk(case.chunk)
        .depth(case.depth)
        .share(2 << 20)
        .build()
        .unwrap();
    let source = pattern(ROOM, 17);
    let memory = rig.device.alloc(ROOM).unwrap();
    copier.upload_slice(&vec![0xa5; ROOM], &memory).unwrap();
    let mut expected = vec![0xa5; ROOM];
    let (mut list, mut to) = (Vec::new(), 0);
    for &(at, len, gap) in &case.pieces {
        to += gap;
        if to + len > ROOM {
            break;
        }
        expected[to..to + len].copy_from_slice(&source[at..at + len]);
        list.push(CopyRange::new(at as u64, memory.slice(to..to + len).unwrap()));
        to += len;
    }
    if list.is_empty() {
        return;
    }
    match case.reading {
        None => drop(copier.upload(source, list.clone()).unwrap().wait().unwrap()),
        Some(way) => {
            let reading = [Reading::Auto, Reading::Buffered, Reading::Direct][way];
            let mut file = tempfile::NamedTempFile::new_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
            file.write_all(&source).unwrap();
            let file = FileSource::open(file.path()).unwrap().reading(reading);
            drop(copier.upload(file, list.clone()).unwrap().wait().unwrap());
        }
    }
    assert!(downloaded(&copier, &memory) == expected);
    // And the same pieces back: each to where it came from, in a sink of their own.
    let mut back = tempfile::NamedTempFile::new_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    back.as_file_mut().set_len(ROOM as u64).unwrap();
    let sink = pinpool::copier::FileSink::new(back.reopen().unwrap(), "back");
    let moved = list.iter().scan(0, |at, piece| {
        let here = *at;
        *at += piece.device.len() as u64 + 3;
        Some(CopyRange::new(here, piece.device.clone()))
    });
    let moved: Vec<CopyRange> = moved.collect();
    let mut wanted = vec![0; ROOM + 64];
    for (piece, &(at, len, _)) in moved.iter().zip(&case.pieces) {
        wanted[piece.at as usize..piece.at as usize + len].copy_from_slice(&pattern(ROOM, 17)[at..at + len]);
    }
    copier.download(moved, sink).unwrap().wait().unwrap();
    let found = std::fs::read(back.path()).unwrap();
    assert!(found[..ROOM] == wanted[..ROOM]);
    rig.all_is_back();
}

/// What overlaps another piece in the source is copied later, though it lies before that one's end.
#[test]
fn a_range_that_two_pieces_want_has_landed_when_both_have_it() {
    let rig = Rig::plain();
    let (copier, other) = (rig.builder().rate(2 << 20).build().unwrap(), rig.copier());
    let source = pattern(1 << 20, 3);
    let memory = rig.device.alloc(2 << 20).unwrap();
    let place = |from: usize, len| memory.slice(from..from + len).unwrap();
    let pieces = vec![CopyRange::new(0, place(0, 1 << 20)), CopyRange::new(100_000, place(1 << 20, 200_000))];
    other.upload_slice(&vec![0; 2 << 20], &memory).unwrap();
    let load = copier.upload(source.clone(), pieces).unwrap();
    let mut before = 0;
    while !load.is_over() {
        let progress = load.progress();
        assert!(progress.landed_to >= before, "{} after {before}", progress.landed_to);
        before = progress.landed_to;
        std::thread::yield_now();
    }
    load.wait().unwrap();
    other.upload_slice(&vec![0; 2 << 20], &memory).unwrap();
    let pieces = vec![CopyRange::new(0, place(0, 1 << 20)), CopyRange::new(100_000, place(1 << 20, 200_000))];
    let load = copier.upload(source.clone(), pieces).unwrap();
    assert!(load.wait_landed(300_000));
    // By another copier, which does not wait for this one.
    let back = downloaded(&other, &memory);
    assert!(back[..300_000] == source[..300_000]);
    assert!(back[1 << 20..][..200_000] == source[100_000..300_000], "both have it");
    load.wait().unwrap();
    rig.all_is_back();
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 96, ..ProptestConfig::default() })]
    #[test]
    fn every_byte_goes_where_it_belongs(case in case()) {
        RIG.with(|rig| run(rig, &case));
    }
}
