//! Headers that are right, and headers that are wrong on purpose.

use pinpool::Error;
use pinpool_safetensors::Checkpoint;
use proptest::prelude::*;
use safetensors::SafeTensors;

use super::{Folder, Made, file, made, with_header};

fn parse(bytes: &[u8]) -> Result<Checkpoint, Error> {
    Checkpoint::open(Folder::new().put("it.safetensors", bytes))
}

/// The tensor that the error names, and why.
fn lie(header: &str, data: usize) -> (Option<Box<str>>, String) {
    match parse(&with_header(header, vec![0; data])) {
        Err(Error::Malformed { what, tensor, why }) if what.ends_with("it.safetensors") => (tensor, why),
        other => panic!("{header}: {other:?}"),
    }
}

#[test]
fn lies_about_a_tensor_name_it() {
    let a = r#""a":{"dtype":"U8","shape":[4],"data_offsets":[0,4]}"#;
    let b = |rest: &str| format!(r#"{{{a},"b":{{{rest}}}}}"#);
    let x = |rest: &str| format!(r#"{{"x":{rest}}}"#);
    let one = r#""dtype":"U8","shape":[1],"data_offsets":[0,1]"#;
    let (most, axes) = (u64::MAX, ",1".repeat(64));
    for (header, data, tensor, why) in [
        (b(r#""dtype":"U8","shape":[4],"data_offsets":[2,6]"#), 6, "b", "starts at 2, and not at 4"),
        (b(r#""dtype":"U8","shape":[4],"data_offsets":[8,4]"#), 8, "b", "does not fit bytes 8..4"),
        (b(r#""dtype":"F32","shape":[4],"data_offsets":[4,8]"#), 8, "b", "F32 of shape [4], which"),
        (x(&format!(r#"{{"dtype":"U8","shape":[{most}],"data_offsets":[0,{most}]}}"#)), 8, "x", ""),
        (x(&format!(r#"{{"shape":[1],{one}}}"#)), 1, "x", "duplicate field"),
        (x(&format!(r#"{{"\ud800":1,{one}}}"#)), 1, "x", "hex escape"),
        (
            x(&format!(r#"{{"dtype":"U8","shape":[1{axes}],"data_offsets":[0,1]}}"#)),
            1,
            "x",
            "more than 64 axes",
        ),
        // A format grows: what an older reader does not know is no damage.
        (x(r#"{"dtype":"U9","shape":[1],"data_offsets":[0,1]}"#), 1, "x", "upgrade pinpool"),
        (format!(r#"{{"\u005f_metadata__":{{{one}}}}}"#), 1, "__metadata__", "metadata is no tensor"),
        // Twice: which of them is meant?
        (format!(r#"{{{a},"a":{{"dtype":"I8","shape":[4],"data_offsets":[0,4]}}}}"#), 4, "a", "not at 4"),
        (format!(r#"{{{a},"\u0061":{{"dtype":"I8","shape":[4],"data_offsets":[4,8]}}}}"#), 8, "a", "twice"),
    ] {
        let (named, text) = lie(&header, data);
        assert!(named.as_deref() == Some(tensor) && text.contains(why), "{header}: {named:?} {text}");
    }
}

#[test]
fn lies_about_the_whole_are_refused() {
    for (header, data, why) in [
        (r#"{"a":{"dtype":"U8","shape":[4],"data_offsets":[0,4]}}"#, 5, "1 bytes at its end"),
        ("{", 0, "no JSON object"),
        (r#"{"__metadata__":{},"__metadata__":{}}"#, 0, "metadata"),
        (r#"{"__metadata__":{"a":"b","c":1}}"#, 0, "no object of texts"),
        (r#"{"__metadata__":{"a":"\ud800"}}"#, 0, "no object of texts"),
    ] {
        let (named, text) = lie(header, data);
        assert!(named.is_none() && text.contains(why), "{header}: {named:?} {text}");
    }
    // Nested until a stack would end.
    lie(&format!(r#"{{"a":{}}}"#, "[".repeat(100_000)), 0);
    for (bytes, why) in [
        // A name that is not UTF-8.
        (8_u64.to_le_bytes().into_iter().chain(*b"{\"\xff\xfe\":{}").collect(), "no JSON object"),
        (vec![], "too few"),
        (9_u64.to_le_bytes().into_iter().chain(*b"{}      ").collect(), "cut off"),
        (100_000_001_u64.to_le_bytes().to_vec(), "split it into several files"),
    ] {
        let error = parse(&bytes).map(drop).unwrap_err();
        let is_it = matches!(&error, Error::Malformed { tensor: None, why: text, .. } if text.contains(why));
        assert!(is_it, "{error}");
    }
}

#[test]
fn what_is_unusual_is_fine() {
    const MANY: u64 = 1 << 63;
    for shape in [[MANY, MANY, 0], [MANY, 0, MANY], [0, MANY, MANY]] {
        let header = format!(r#"{{"a":{{"dtype":"F32","shape":{shape:?},"data_offsets":[0,0]}}}}"#);
        let read = parse(&with_header(&header, [])).unwrap();
        assert!(read.tensors().next().is_some_and(|tensor| tensor.bytes() == 0 && tensor.shape().len() == 3));
    }
    for (header, metadata) in [
        ("{}", None),
        (r#"{"__metadata__":{"b":"2","a":"1"}}      "#, Some(r#"{"b":"2","a":"1"}"#)),
        (r#"{"__metadata__":null}"#, None),
    ] {
        let read = parse(&with_header(header, [])).unwrap();
        assert!(read.tensors().next().is_none() && read.metadata().next() == metadata, "{header}");
    }
    // Types whose elements are no whole bytes, and those of a byte that came later.
    for (dtype, shape, bytes) in
        [("F4", vec![3, 6], 9), ("F6_E3M2", vec![2, 2, 4], 12), ("F8_E8M0", vec![5], 5), ("C64", vec![2], 16)]
    {
        let header = |end: usize| {
            format!(r#"{{"a":{{"dtype":"{dtype}","shape":{shape:?},"data_offsets":[0,{end}]}}}}"#)
        };
        let whole = with_header(&header(bytes), vec![0; bytes]);
        is_sound(&parse(&whole).unwrap(), &whole);
        assert_eq!(lie(&header(bytes + 1), bytes + 1).0.as_deref(), Some("a"));
    }
}

fn tensors() -> impl Strategy<Value = Vec<Made>> {
    let dtype = prop::sample::select(vec!["U8", "BOOL", "BF16", "F32", "I64"]);
    let shape = prop::collection::vec(0_usize..6, 0..4);
    prop::collection::vec((dtype, shape), 0..8).prop_map(|list| {
        let numbered = (0..).zip(list);
        numbered.map(|(i, (dtype, shape))| made(&format!("t.{i:02}"), dtype, &shape, i)).collect()
    })
}

/// A header that is accepted has its tensors side by side behind it, up to the file's end, each as long as its shape
/// says.
fn is_sound(read: &Checkpoint, bytes: &[u8]) {
    let mut end = 8 + u64::from_le_bytes(bytes[..8].try_into().unwrap());
    for tensor in read.tensors() {
        assert_eq!(tensor.range().start, end, "{tensor:?}");
        let bits: u128 =
            tensor.shape().iter().map(|&n| n as u128).product::<u128>() * tensor.dtype().bitsize() as u128;
        assert_eq!(u128::from(tensor.bytes()) * 8, bits, "{tensor:?}");
        end = tensor.range().end;
    }
    assert_eq!(end, bytes.len() as u64);
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(400))]

    #[test]
    fn what_was_changed_is_sound_or_refused(
        tensors in tensors(),
        changes in prop::collection::vec((any::<prop::sample::Index>(), any::<u8>(), 0..4_u8), 0..6),
    ) {
        let mut bytes = file(&tensors);
        for (at, byte, how) in &changes {
            if bytes.is_empty() {
                break;
            }
            let at = at.index(bytes.len());
            match how {
                0 => bytes[at] = *byte,
                // More often something that is JSON still.
                1 if bytes[at].is_ascii_digit() => bytes[at] = b'0' + byte % 10,
                1 => bytes[at] = *byte,
                2 => bytes.truncate(at),
                _ => bytes.insert(at, *byte),
            }
        }
        // What the format's own crate says of it.
        let theirs = SafeTensors::deserialize(&bytes);
        match parse(&bytes) {
            Ok(read) => {
                is_sound(&read, &bytes);
                let theirs = theirs.unwrap();
                prop_assert_eq!(theirs.len(), read.tensors().count());
                for tensor in read.tensors() {
                    let view = theirs.tensor(tensor.name()).unwrap();
                    prop_assert_eq!((view.dtype(), view.shape()), (tensor.dtype(), tensor.shape()));
                    let range = tensor.range();
                    prop_assert_eq!(view.data(), &bytes[range.start as usize..range.end as usize]);
                }
            }
            Err(Error::Malformed { why, .. }) => {
                // That crate lets a name come twice.
                prop_assert!(theirs.is_err() || why.contains("twice") || why.contains("not at"), "{}", why);
                prop_assert!(!changes.is_empty());
            }
            Err(error) => prop_assert!(false, "{error}"),
        }
    }
}
