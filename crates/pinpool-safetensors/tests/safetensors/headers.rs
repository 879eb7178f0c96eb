//! Headers that are right, and headers that are wrong on purpose.

use pinpool::Error;
use pinpool_safetensors::{Checkpoint, Header};
use proptest::prelude::*;
use safetensors::SafeTensors;

use super::{Folder, Made, file, made, with_header};

fn parse(bytes: &[u8]) -> Result<Header, Error> {
    Header::parse("it", bytes, bytes.len() as u64)
}

/// The tensor that the error names, and why.
fn lie(header: &str, data: usize) -> (Option<Box<str>>, String) {
    let bytes = with_header(header, vec![0; data]);
    let error = parse(&bytes).map(drop).expect_err(header);
    // The same from a file.
    let folder = Folder::new();
    let path = folder.put("a.safetensors", &bytes);
    let opened = Checkpoint::open(path).map(drop).expect_err(header);
    match (error, opened) {
        (Error::Malformed { what, tensor, why }, Error::Malformed { tensor: also, .. }) => {
            assert_eq!((what.as_str(), &tensor), ("it", &also));
            (tensor, why)
        }
        (error, _) => panic!("{header}: {error}"),
    }
}

#[test]
fn lies_about_a_tensor_name_it() {
    let a = r#""a":{"dtype":"U8","shape":[4],"data_offsets":[0,4]}"#;
    let b = |rest: &str| format!(r#"{{{a},"b":{{{rest}}}}}"#);
    for (header, data, tensor, why) in [
        (b(r#""dtype":"U8","shape":[4],"data_offsets":[2,6]"#), 6, "b", "inside of tensor \"a\""),
        (b(r#""dtype":"U8","shape":[4],"data_offsets":[5,9]"#), 9, "b", "4..5 before it belong to no tensor"),
        (b(r#""dtype":"U8","shape":[4],"data_offsets":[4,8]"#), 7, "b", "past the file's end"),
        (b(r#""dtype":"U8","shape":[4],"data_offsets":[8,4]"#), 8, "b", "ends at 4, before its start at 8"),
        (b(r#""dtype":"F32","shape":[4],"data_offsets":[4,8]"#), 8, "b", "16 bytes, and has 4"),
        (b(r#""dtype":"U8","shape":[3],"data_offsets":[4,8]"#), 8, "b", "3 bytes, and has 4"),
        (b(r#""dtype":"F4","shape":[3],"data_offsets":[4,6]"#), 6, "b", "no whole number of bytes"),
        (
            b(r#""dtype":"U8","shape":[4294967296,4294967296,2],"data_offsets":[4,4]"#),
            4,
            "b",
            "more elements than",
        ),
        (
            b(r#""dtype":"I64","shape":[4611686018427387904],"data_offsets":[4,4]"#),
            4,
            "b",
            "more elements than",
        ),
        (b(r#""dtype":"U9","shape":[4],"data_offsets":[4,8]"#), 8, "b", "U9"),
        (b(r#""dtype":"U8","shape":[-4],"data_offsets":[4,8]"#), 8, "b", "-4"),
        (b(r#""dtype":"U8","shape":[4],"data_offsets":[4,18446744073709551616]"#), 8, "b", "described"),
        (b(r#""dtype":"U8","shape":[4],"data_offsets":[4]"#), 8, "b", "described"),
        (b(r#""dtype":"U8","shape":[4]"#), 8, "b", "data_offsets"),
        (b(""), 8, "b", "described"),
        (
            r#"{"x":{"dtype":"U8","shape":[18446744073709551615],"data_offsets":[0,18446744073709551615]}}"#
                .into(),
            8,
            "x",
            "more elements than",
        ),
        (r#"{"x":{"dtype":"U8","shape":[1],"data_offsets":[1,2]}}"#.into(), 2, "x", "belong to no tensor"),
        (r#"{"x":7}"#.into(), 0, "x", "described"),
        (r#"{"x":{"dtype":"U8","shape":[1,],"data_offsets":[0,1]}}"#.into(), 1, "x", "described"),
        (r#"{"x":{"dtype":"U8","shape":[1e0],"data_offsets":[0,1]}}"#.into(), 1, "x", "whole numbers"),
        (r#"{"x":{"dtype":"U8","shape":[[1]],"data_offsets":[0,1]}}"#.into(), 1, "x", "whole numbers"),
        (r#"{"x":{"dtype":{"U8":null},"shape":[1],"data_offsets":[0,1]}}"#.into(), 1, "x", "no type"),
        (r#"{"x":{"dtype":"U8","shape":[1],"shape":[1],"data_offsets":[0,1]}}"#.into(), 1, "x", "twice"),
        (r#"{"x":{"\ud800":1,"dtype":"U8","shape":[1],"data_offsets":[0,1]}}"#.into(), 1, "x", "hex escape"),
        // Twice: which of them is meant?
        (
            format!(r#"{{{a},"a":{{"dtype":"I8","shape":[4],"data_offsets":[0,4]}}}}"#),
            4,
            "a",
            "inside of tensor \"a\"",
        ),
        (format!(r#"{{{a},"a":{{"dtype":"I8","shape":[4],"data_offsets":[4,8]}}}}"#), 8, "a", "twice"),
        (
            r#"{"n":{"dtype":"U8","shape":[0],"data_offsets":[0,0]},"n":{"dtype":"F32","shape":[0],"data_offsets":[0,0]}}"#
                .into(),
            0,
            "n",
            "twice",
        ),
    ] {
        let (named, text) = lie(&header, data);
        assert_eq!(named.as_deref(), Some(tensor), "{header}: {text}");
        assert!(text.contains(why), "{header}: {text}");
    }
}

#[test]
fn lies_about_the_whole_are_refused() {
    for (header, data, why) in [
        (
            r#"{"a":{"dtype":"U8","shape":[4],"data_offsets":[0,4]}}"#,
            5,
            "1 bytes at its end belong to no tensor",
        ),
        ("{}", 1, "belong to no tensor"),
        ("[]", 0, "no JSON object"),
        ("", 0, "no JSON object"),
        ("{", 0, "no JSON object"),
        ("\u{0}", 0, "no JSON object"),
        (r#"{"__metadata__":{"n":1}}"#, 0, "metadata"),
        (r#"{"__metadata__":"text"}"#, 0, "metadata"),
        (r#"{"__metadata__":{"a":"\ud800"}}"#, 0, "metadata"),
        (r#"{"__metadata__":{"\ud800":"a"}}"#, 0, "metadata"),
        (r#"{"__metadata__":{"a":"b"},}"#, 0, "no JSON object"),
        (r#"{"__metadata__":{},"__metadata__":{}}"#, 0, "metadata"),
        (r#"{"a":{"dtype":"U8""#, 0, "no JSON object"),
        ("{} x", 0, "no JSON object"),
    ] {
        let (named, text) = lie(header, data);
        assert_eq!(named, None, "{header}: {text}");
        assert!(text.contains(why), "{header}: {text}");
    }
    // Nested until a stack would end.
    let deep = format!(r#"{{"a":{}}}"#, "[".repeat(100_000));
    lie(&deep, 0);
    for (bytes, why) in [
        // A name that is not UTF-8.
        (8_u64.to_le_bytes().into_iter().chain(*b"{\"\xff\xfe\":{}").collect(), "no JSON object"),
        (vec![], "too few"),
        (vec![1, 0, 0, 0, 0, 0, 0], "too few"),
        (9_u64.to_le_bytes().into_iter().chain(*b"{}      ").collect(), "cut off"),
        ([0xff; 64].to_vec(), "the format allows 100000000"),
        (100_000_000_u64.to_le_bytes().to_vec(), "cut off"),
        (100_000_001_u64.to_le_bytes().to_vec(), "the format allows"),
    ] {
        let Err(Error::Malformed { tensor: None, why: text, .. }) = parse(&bytes) else {
            panic!("{bytes:?}")
        };
        assert!(text.contains(why), "{text}");
        let folder = Folder::new();
        let opened = Checkpoint::open(folder.put("a.safetensors", &bytes)).map(drop).unwrap_err();
        assert!(opened.to_string().contains(why), "{opened}");
    }
    // A file that is longer than its given length.
    let whole = file(&[made("a", "U8", &[40], 1)]);
    let len = whole.len() as u64;
    assert_eq!(Header::parse("it", &whole[..whole.len() - 40], len).unwrap().tensors().count(), 1);
    assert!(Header::parse("it", &whole[..whole.len() - 41], len).is_err());
}

/// A format grows: what an older reader does not know is no damage.
#[test]
fn a_type_that_is_not_known_may_be_of_a_newer_format() {
    for dtype in ["I4", "C128", "NF4", "F8_E4M3B11FNUZ", "f32"] {
        let header = format!(r#"{{"a":{{"dtype":"{dtype}","shape":[4],"data_offsets":[0,4]}}}}"#);
        let (named, why) = lie(&header, 4);
        assert_eq!(named.as_deref(), Some("a"));
        assert!(why.contains(&format!("\"{dtype}\"")) && why.contains("upgrade pinpool"), "{why}");
        assert!(!why.contains("damaged") && !why.contains("mislead"), "{why}");
    }
}

/// Some million tensors have so long a header.
#[test]
fn a_header_longer_than_the_format_allows_is_to_be_split() {
    let mut start = 132_000_000_u64.to_le_bytes().to_vec();
    start.extend_from_slice(br#"{"a":{"dtype":"U8","shape":[4],"data_offsets":[0,4]},"#);
    let folder = Folder::new();
    let path = folder.put("a.safetensors", &start);
    std::fs::OpenOptions::new().write(true).open(&path).unwrap().set_len(140_000_000).unwrap();
    for refused in [Header::parse("it", &start, 140_000_000).map(drop), Checkpoint::open(path).map(drop)] {
        let why = refused.unwrap_err().to_string();
        assert!(why.contains("132000000 bytes") && why.contains("the format allows 100000000"), "{why}");
        assert!(why.contains("split it into several files") && !why.contains("no safetensors file"), "{why}");
    }
}

#[test]
fn shapes_of_more_axes_than_anybody_uses_are_refused() {
    let axes = |count: usize| {
        let shape = vec!["1"; count].join(",");
        format!(r#"{{"a":{{"dtype":"U8","shape":[{shape}],"data_offsets":[0,2]}}}}"#)
    };
    for count in [65, 500_000] {
        let (named, why) = lie(&axes(count), 2);
        assert!(named.as_deref() == Some("a") && why.contains("more than 64 axes"), "{named:?}");
        assert!(why.len() < 1000, "{count} axes are told in {} bytes", why.len());
    }
    // As many tensors as may be: the error names what is wrong, and not all of them.
    let (_, why) = lie(&axes(64), 2);
    assert!(why.contains("of shape [1,1,1,") && why.contains(",1..., 1 bytes, and has 2"), "{why}");
    let fine = format!(r#"{{"a":{{"dtype":"U8","shape":[{}2],"data_offsets":[0,2]}}}}"#, "1,".repeat(63));
    assert_eq!(parse(&with_header(&fine, [0; 2])).unwrap().tensors().next().unwrap().shape().len(), 64);
}

/// A header may be a hundred megabytes long; an error text is short enough to read.
#[test]
fn what_a_stranger_wrote_is_not_all_in_the_message() {
    let long = "\u{1f600}x\\n".repeat(40_000);
    let a = r#""dtype":"U8","shape":[4],"data_offsets":[0,4]"#;
    for header in [
        format!(r#"{{"{long}":{{"dtype":"U8","shape":[3],"data_offsets":[0,4]}}}}"#),
        format!(r#"{{"{long}":{{{a}}},"b":{{{a}}}}}"#),
        format!(r#"{{"{long}":{{{a}}},"{long}":{{{a}}}}}"#),
        format!(r#"{{"{long}":"{long}"}}"#),
        format!(r#"{{"a":{{"dtype":"{long}","shape":[4],"data_offsets":[0,4]}}}}"#),
        format!(r#"{{"a":{{"dtype":"U8","shape":"{long}","data_offsets":[0,4]}}}}"#),
        format!(r#"{{"__metadata__":"{long}"}}"#),
        format!(r#""{long}""#),
    ] {
        let bytes = with_header(&header, [0; 4]);
        let error = parse(&bytes).unwrap_err();
        let len = error.to_string().len();
        assert!(len < 4000, "{len} bytes");
        let Error::Malformed { tensor, .. } = error else { panic!("{error}") };
        assert!(tensor.is_none_or(|name| name.chars().count() <= 203));
    }
    // A name that is not so long is shown whole.
    let name = "n".repeat(200);
    let (named, _) = lie(&format!(r#"{{"{name}":7}}"#), 0);
    assert_eq!(named.as_deref(), Some(&*name));
}

#[test]
fn no_elements_along_one_axis_are_none_in_all() {
    const MANY: u64 = 1 << 63;
    for shape in [[MANY, MANY, 0], [MANY, 0, MANY], [0, MANY, MANY]] {
        let header = format!(r#"{{"a":{{"dtype":"F32","shape":{shape:?},"data_offsets":[0,0]}}}}"#);
        let read = parse(&with_header(&header, [])).unwrap();
        assert!(read.tensors().next().is_some_and(|tensor| tensor.bytes() == 0 && tensor.shape().len() == 3));
    }
}

#[test]
fn an_empty_file_of_the_format_is_fine() {
    let header = parse(&with_header("{}", [])).unwrap();
    assert!(header.tensors().next().is_none() && header.metadata().is_none());
    let header = parse(&with_header(r#"{"__metadata__":{"b":"2","a":"1"}}      "#, [])).unwrap();
    assert_eq!(header.metadata(), Some(r#"{"b":"2","a":"1"}"#));
    let header = parse(&with_header(r#"{"__metadata__":null}"#, [])).unwrap();
    assert!(header.metadata().is_none());
}

/// Types whose elements are no whole bytes, and those of a byte that came later.
#[test]
fn elements_smaller_than_a_byte_are_counted_in_bits() {
    for (dtype, shape, bytes) in [
        ("F4", vec![2], 1),
        ("F4", vec![3, 6], 9),
        ("F4", vec![0, 3], 0),
        ("F6_E2M3", vec![4], 3),
        ("F6_E3M2", vec![2, 2, 4], 12),
        ("F8_E8M0", vec![5], 5),
        ("F8_E4M3FNUZ", vec![5], 5),
        ("C64", vec![2], 16),
    ] {
        let header = |end: usize| {
            format!(r#"{{"a":{{"dtype":"{dtype}","shape":{shape:?},"data_offsets":[0,{end}]}}}}"#)
        };
        let whole = with_header(&header(bytes), vec![0; bytes]);
        let read = parse(&whole).unwrap();
        is_sound(&read, &whole);
        assert_eq!(read.tensors().next().unwrap().bytes(), bytes as u64, "{dtype} {shape:?}");
        let (named, text) = lie(&header(bytes + 1), bytes + 1);
        assert!(named.as_deref() == Some("a") && text.contains(&format!("{bytes} bytes")), "{text}");
    }
    for (dtype, shape) in [("F4", vec![1]), ("F4", vec![3, 3]), ("F6_E2M3", vec![2]), ("F6_E3M2", vec![1])] {
        let header = format!(r#"{{"a":{{"dtype":"{dtype}","shape":{shape:?},"data_offsets":[0,1]}}}}"#);
        let (named, text) = lie(&header, 1);
        assert!(named.as_deref() == Some("a") && text.contains("no whole number of bytes"), "{text}");
    }
}

fn tensors() -> impl Strategy<Value = Vec<Made>> {
    let dtype = prop::sample::select(vec!["U8", "BOOL", "BF16", "F32", "I64"]);
    let shape = prop::collection::vec(0_usize..6, 0..4);
    prop::collection::vec((dtype, shape), 0..8).prop_map(|list| {
        let made = list
            .into_iter()
            .enumerate()
            .map(|(i, (dtype, shape))| made(&format!("t.{i:02}"), dtype, &shape, i as u64));
        made.collect()
    })
}

/// A header that is accepted has its tensors side by side behind it, up to the file's end, each as long as its shape
/// says.
fn is_sound(header: &Header, bytes: &[u8]) {
    let start = 8 + u64::from_le_bytes(bytes[..8].try_into().unwrap());
    let mut end = start;
    for tensor in header.tensors() {
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
    fn what_was_written_is_read(tensors in tensors()) {
        let bytes = file(&tensors);
        let header = parse(&bytes).unwrap();
        is_sound(&header, &bytes);
        prop_assert_eq!(header.tensors().count(), tensors.len());
        for made in &tensors {
            let tensor = header.tensors().find(|tensor| tensor.name() == made.name).unwrap();
            prop_assert_eq!(tensor.shape(), &made.shape[..]);
            let range = tensor.range();
            prop_assert_eq!(&bytes[range.start as usize..range.end as usize], &made.bytes[..]);
        }
    }

    #[test]
    fn what_was_changed_is_sound_or_refused(
        tensors in tensors(),
        changes in prop::collection::vec((any::<prop::sample::Index>(), any::<u8>(), 0..4_u8), 1..6),
    ) {
        let mut bytes = file(&tensors);
        for (at, byte, how) in changes {
            if bytes.is_empty() {
                break;
            }
            let at = at.index(bytes.len());
            match how {
                0 => bytes[at] = byte,
                // More often something that is JSON still.
                1 if bytes[at].is_ascii_digit() => bytes[at] = b'0' + byte % 10,
                1 => bytes[at] = byte,
                2 => bytes.truncate(at),
                _ => bytes.insert(at, byte),
            }
        }
        // What the format's own crate says of it.
        let theirs = SafeTensors::deserialize(&bytes);
        match parse(&bytes) {
            Ok(header) => {
                is_sound(&header, &bytes);
                let theirs = theirs.unwrap();
                prop_assert_eq!(theirs.len(), header.tensors().count());
                for tensor in header.tensors() {
                    let view = theirs.tensor(tensor.name()).unwrap();
                    prop_assert_eq!((view.dtype(), view.shape()), (tensor.dtype(), tensor.shape()));
                    let range = tensor.range();
                    prop_assert_eq!(view.data(), &bytes[range.start as usize..range.end as usize]);
                }
            }
            Err(Error::Malformed { what, why, .. }) => {
                prop_assert!(what == "it" && !why.is_empty());
                // That crate lets a name come twice.
                prop_assert!(theirs.is_err() || why.contains("twice") || why.contains("inside"), "{}", why);
            }
            Err(error) => prop_assert!(false, "{error}"),
        }
    }
}
