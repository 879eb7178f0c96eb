//! Parts of a checkpoint: windows, and rows of tensors.

use pinpool_safetensors::{Checkpoint, Tensor, windows};
use proptest::prelude::*;
use proptest::test_runner::TestRunner;

use super::{Folder, Made, Rig, arrived, drained, file, is_argument, made, shards, with_header};

#[test]
fn windows_have_every_tensor_once_in_order_and_a_bound() {
    let rig = Rig::plain();
    let copier = rig.copier();
    let lens = proptest::collection::vec(prop_oneof![Just(0), 1..40_usize, 1..3000_usize], 1..24);
    let cases = (lens, 1..40_usize, 0..6000_u64, 0..=8);
    let case = |(lens, each, bytes, align): (Vec<usize>, _, _, _)| {
        let named = |(at, len): (usize, &usize)| made(&format!("t{at}"), "U8", &[*len], at as u64);
        let tensors: Vec<Made> = lens.iter().enumerate().map(named).collect();
        let folder = Folder::new();
        let (_, checkpoint) = shards(&folder, &tensors, each);
        let mut rest = &tensors[..];
        for window in windows(checkpoint.tensors(), bytes) {
            let (count, mut taken) = (window.len(), 0);
            let memory = |len: usize| {
                taken += len.next_multiple_of(256) as u64;
                rig.device.alloc(len)?.slice(..)
            };
            let loader = checkpoint.loader(&copier).only(window).align(1_usize << align);
            let (got, error) = drained(&loader.memory(memory).start().unwrap(), false);
            prop_assert!(error.is_none());
            arrived(&copier, &got, &rest[..count]);
            prop_assert!(taken <= bytes || count == 1, "{taken} bytes of {bytes}");
            rest = &rest[count..];
            // The next tensor would not have fitted: windows are as few as they can be.
            let next = rest.first().map_or(u64::MAX, |made| made.bytes.len().next_multiple_of(256) as u64);
            let total: u64 = got.iter().map(|tensor| tensor.bytes().next_multiple_of(256)).sum();
            prop_assert!(total.saturating_add(next) > bytes);
        }
        prop_assert!(rest.is_empty());
        Ok(())
    };
    TestRunner::new(ProptestConfig::with_cases(40)).run(&cases, case).unwrap();
}

/// As a rank of several has them: of one tensor the first rows, of one the last, of one none.
#[test]
fn of_rows_nothing_else_is_loaded() {
    let (rig, folder) = (Rig::late(), Folder::new());
    let tensors = [
        made("a", "F32", &[300, 70, 3], 1),
        made("b", "BF16", &[64], 2),
        made("whole", "U8", &[17], 3),
        made("c", "I64", &[9, 5], 4),
        made("none", "F32", &[4, 0], 5),
    ];
    let copier = rig.copier();
    let checkpoint = Checkpoint::open(folder.put("model.safetensors", file(&tensors))).unwrap();
    let get = |name: &str| checkpoint.get(name).unwrap();
    let cut = |at: usize, rows: std::ops::Range<usize>| {
        let Made { name, dtype, shape, bytes } = tensors[at].clone();
        let row = bytes.len() / shape[0];
        let shape = [&[rows.len()], &shape[1..]].concat();
        Made { name, dtype, shape, bytes: bytes[rows.start * row..rows.end * row].to_vec() }
    };
    let rows = |name: &str, rows| get(name).rows(rows).unwrap();
    let chosen = [rows("none", 1..3), rows("c", 8..9), get("whole"), rows("a", 100..250), rows("b", 5..5)];
    let expected = [cut(0, 100..250), cut(1, 5..5), tensors[2].clone(), cut(3, 8..9), cut(4, 1..3)];
    let load = checkpoint.loader(&copier).only(chosen.clone()).start().unwrap();
    let bytes: usize = expected.iter().map(|made| made.bytes.len()).sum();
    assert_eq!(load.progress().total, bytes as u64, "no other byte is copied");
    arrived(&copier, &drained(&load, true).0, &expected);
    // To places of the program's, in a load that needs no more than them, and taken by name.
    let place = |tensor: &Tensor| rig.device.alloc(tensor.bytes() as usize)?.slice(..).map(Some);
    let load = checkpoint.loader(&copier).only(chosen).first("c").places(place).start().unwrap();
    arrived(&copier, &[load.take("a").unwrap().unwrap()], &expected[..1]);
    arrived(&copier, &drained(&load, false).0, [&expected[3], &expected[1], &expected[2], &expected[4]]);
    // Rows of rows.
    let (some, all) = (rows("a", 10..20).rows(3..5).unwrap(), rows("a", 13..15));
    assert_eq!((some.range(), some.shape()), (all.range(), &[2, 70, 3][..]));
    let offsets = get("b").data_offsets();
    assert_eq!((offsets.start, offsets.end), (300 * 70 * 3 * 4, 300 * 70 * 3 * 4 + 128));
}

#[test]
fn rows_and_tensors_that_are_not_there_are_refused() {
    let (rig, folder) = (Rig::plain(), Folder::new());
    let header = r#"{"s":{"dtype":"U8","shape":[],"data_offsets":[0,1]},
        "f4":{"dtype":"F4","shape":[4,3],"data_offsets":[1,7]}}"#;
    let path = folder.put("model.safetensors", with_header(header, [7; 7]));
    let (copier, checkpoint) = (rig.copier(), Checkpoint::open(&path).unwrap());
    let f4 = checkpoint.get("f4").unwrap();
    let backwards = std::ops::Range { start: 3, end: 2 };
    for (name, rows, why) in [
        ("s", 0..0, "single element"),
        ("f4", 0..5, "it has 4"),
        ("f4", backwards, "it has 4"),
        ("f4", 0..usize::MAX, "it has 4"),
        ("f4", 1..4, "within a byte"),
    ] {
        is_argument(&checkpoint.get(name).unwrap().rows(rows).unwrap_err(), why);
    }
    assert_eq!(f4.rows(2..4).unwrap().range().end, f4.range().end);
    let other = Checkpoint::open(&path).unwrap().get("s").unwrap();
    for (only, why) in [(vec![other], "of another checkpoint"), (vec![f4.rows(0..2).unwrap(), f4], "twice")] {
        is_argument(&checkpoint.loader(&copier).only(only).start().map(drop).unwrap_err(), why);
    }
}
