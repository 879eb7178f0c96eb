//! Any lengths, any places, any pieces: what arrives is what was sent, where it was sent to, and nothing else is
//! touched.

use proptest::prelude::*;

use super::*;

/// Bytes of the device memory and of the source that the cases use.
const ROOM: usize = 700_000;

/// From, length, gap in front on the device.
type Taken = (usize, usize, usize);

/// Pieces, in the order in which they are named.
fn pieces() -> impl Strategy<Value = Vec<Taken>> {
    let len = prop_oneof![1..40_usize, 4090..4100_usize, 1..90_000_usize, 65_530..65_545_usize];
    let at = prop_oneof![Just(0), 0..20_000_usize, Just(4096), 0..600_000_usize];
    let piece = (at, len, prop_oneof![Just(0), 0..70_usize, 0..9000_usize]);
    prop::collection::vec(piece, 1..12)
}

thread_local! {
    static RIG: Rig = Rig::plain();
}

fn run(
    rig: &Rig,
    (threads, chunk, depth): (usize, usize, usize),
    pieces: &[Taken],
    reading: Option<Reading>,
) {
    let copier = rig.builder().threads(threads).chunk(chunk).depth(depth).share(2 << 20).build().unwrap();
    let source = pattern(ROOM, 17);
    let memory = rig.device.alloc(ROOM).unwrap();
    copier.upload_slice(&vec![0xa5; ROOM], &memory).unwrap();
    let mut expected = vec![0xa5; ROOM];
    let (mut list, mut to) = (Vec::new(), 0);
    for &(at, len, gap) in pieces {
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
    match reading {
        None => drop(copier.upload(source.clone(), list.clone()).unwrap().wait().unwrap()),
        Some(reading) => {
            let file = file_of(&source);
            let file = FileSource::open(file.path()).unwrap().reading(reading);
            drop(copier.upload(file, list.clone()).unwrap().wait().unwrap());
        }
    }
    assert!(downloaded(&copier, &memory) == expected);
    // And the same pieces back: each to where it came from, in a sink of their own.
    let back = file_of(&vec![0; ROOM]);
    let sink = FileSink::new(back.reopen().unwrap(), "back");
    let (mut wanted, mut end) = (vec![0; ROOM + 64], 0);
    for (piece, &(at, len, _)) in list.iter_mut().zip(pieces) {
        piece.at = end as u64;
        wanted[end..end + len].copy_from_slice(&source[at..at + len]);
        end += len + 3;
    }
    copier.download(list, sink).unwrap().wait().unwrap();
    assert!(std::fs::read(back.path()).unwrap() == wanted[..ROOM]);
    rig.all_is_back();
}

/// What overlaps another piece in the source is copied later, though it lies before that one's end.
#[test]
fn a_range_that_two_pieces_want_has_landed_when_both_have_it() {
    let rig = Rig::plain();
    let (copier, other) = (rig.builder().rate(4 << 20).build().unwrap(), rig.copier());
    let source = pattern(1 << 20, 3);
    let memory = rig.device.alloc(2 << 20).unwrap();
    let place = |from: usize, len| memory.slice(from..from + len).unwrap();
    let pieces = vec![CopyRange::new(0, place(0, 1 << 20)), CopyRange::new(100_000, place(1 << 20, 200_000))];
    other.upload_slice(&vec![0; 2 << 20], &memory).unwrap();
    let load = copier.upload(source.clone(), pieces).unwrap();
    let mut before = 0;
    while before < 300_000 {
        let landed = load.progress().landed_to;
        assert!(landed >= before, "{landed} after {before}");
        before = landed;
        std::thread::yield_now();
    }
    // By another copier, which does not wait for this one.
    let back = downloaded(&other, &memory);
    assert!(back[..300_000] == source[..300_000]);
    assert!(back[1 << 20..][..200_000] == source[100_000..300_000], "both have it");
    load.wait().unwrap();
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 64, ..ProptestConfig::default() })]
    #[test]
    fn every_byte_goes_where_it_belongs(
        threads in 1..5_usize,
        chunk in 16_384..60_000_usize,
        depth in 1..4_usize,
        pieces in pieces(),
        reading in prop::option::of(prop::sample::select(&[Reading::Auto, Reading::Buffered, Reading::Direct])),
    ) {
        RIG.with(|rig| run(rig, (threads, chunk, depth), &pieces, reading));
    }
}
