//! The header of an untrusted safetensors file: any bytes, and headers that are nearly right.
//!
//! Random bytes are rarely valid JSON, so half of the inputs are a list of tensors that is written as a header, with
//! wrong values where the input asks for them. An accepted header must be sound, by other arithmetic than the
//! library's: tensors side by side from the header's end to the file's end, each as long as its shape and type require.
//! And a header that was written without a wrong value must be accepted, as it was written.
#![no_main]

use std::fmt::Write;
use std::fs::File;
use std::io::Write as _;
use std::os::fd::{AsRawFd, FromRawFd};

use arbitrary::Arbitrary;
use libfuzzer_sys::fuzz_target;
use pinpool::Error;
use pinpool_safetensors::Checkpoint;

/// The types, and the bits of an element.
const TYPES: [(&str, u128); 8] =
    [("U8", 8), ("BOOL", 8), ("F4", 4), ("F6_E2M3", 6), ("BF16", 16), ("F32", 32), ("I64", 64), ("U9", 9)];

#[derive(Arbitrary, Debug)]
struct Tensor {
    dtype: u8,
    shape: Vec<u16>,
    lie: Lie,
}

#[derive(Arbitrary, Clone, Copy, Debug, PartialEq, Eq)]
enum Lie {
    None,
    /// These two change nothing either, so that most tensors are correct.
    Nor,
    Still,
    Start(i32),
    End(i32),
    Axis(u64),
    SameName,
}

#[derive(Arbitrary, Debug)]
enum Input {
    Bytes { front: u64, rest: Vec<u8>, more: u16 },
    Tensors { list: Vec<Tensor>, more: i8, change: Option<(u16, u8)> },
}

fn sound(header: &Checkpoint, start: u64, len: u64) {
    let mut end = start;
    for tensor in header.tensors() {
        let range = tensor.range();
        assert_eq!(range.start, end, "{tensor:?}");
        let elements: u128 = tensor.shape().iter().map(|&n| n as u128).fold(1, u128::saturating_mul);
        assert_eq!(u128::from(range.end - range.start) * 8, elements * tensor.dtype().bitsize() as u128);
        end = range.end;
    }
    assert_eq!(end, len);
}

/// Opens a file in memory of these bytes, and of zeros up to a length, where the system allows one of that length.
fn parse(bytes: &[u8], len: u64) -> Option<Checkpoint> {
    // SAFETY: the name ends with a zero, and nothing else owns the new descriptor.
    let mut file = unsafe { File::from_raw_fd(libc::memfd_create(c"it".as_ptr(), 0)) };
    file.write_all(bytes).expect("memory");
    file.set_len(len).ok()?;
    match Checkpoint::open(format!("/proc/self/fd/{}", file.as_raw_fd())) {
        Ok(header) => {
            let n = u64::from_le_bytes(bytes[..8].try_into().expect("it has a length"));
            sound(&header, 8 + n, len);
            Some(header)
        }
        Err(Error::Malformed { why, .. }) => {
            assert!(!why.is_empty());
            None
        }
        Err(error) => panic!("{error}"),
    }
}

fn written(list: &[Tensor], more: i8, change: Option<(u16, u8)>) {
    let (mut header, mut end, mut honest) = (String::from("{"), 0_u64, true);
    for (number, Tensor { dtype, shape, lie }) in list.iter().take(40).enumerate() {
        let (name, bits) = TYPES[usize::from(*dtype) % TYPES.len()];
        let mut shape: Vec<u64> = shape.iter().take(4).map(|&n| u64::from(n)).collect();
        let bits = shape.iter().map(|&n| u128::from(n)).product::<u128>() * bits;
        // A number of bits that overflows a word is refused, since no memory is that large.
        honest &= name != "U9" && bits % 8 == 0 && bits <= u128::from(u64::MAX);
        let (mut from, mut to) = (end, end.saturating_add(u64::try_from(bits / 8).unwrap_or(u64::MAX)));
        end = to;
        let mut own = number;
        match *lie {
            Lie::None | Lie::Nor | Lie::Still => {}
            Lie::Start(by) => from = from.wrapping_add_signed(by.into()),
            Lie::End(by) => to = to.wrapping_add_signed(by.into()),
            Lie::Axis(axis) => shape.push(axis),
            Lie::SameName => own = own.saturating_sub(1),
        }
        honest &= matches!(lie, Lie::None | Lie::Nor | Lie::Still);
        let comma = if number > 0 { "," } else { "" };
        let _ = write!(
            header,
            r#"{comma}"t{own}":{{"dtype":"{name}","shape":{shape:?},"data_offsets":[{from},{to}]}}"#
        );
    }
    header.push('}');
    let mut bytes: Vec<u8> = (header.len() as u64).to_le_bytes().into_iter().chain(header.bytes()).collect();
    let len = (bytes.len() as u64).saturating_add(end).wrapping_add_signed(more.into());
    // No file is longer.
    honest &= more == 0 && len < i64::MAX as u64;
    if let Some((at, to)) = change {
        let at = usize::from(at) % bytes.len();
        honest &= bytes[at] == to;
        bytes[at] = to;
    }
    let read = parse(&bytes, len);
    if honest {
        let header = read.expect("it was written as it should be");
        assert_eq!(header.tensors().count(), list.len().min(40));
    }
}

fuzz_target!(|input: Input| {
    match input {
        Input::Bytes { front, rest, more } => {
            // Lengths that fit are as frequent as others.
            for front in [front, rest.len() as u64, front % (rest.len() as u64 + 9)] {
                let bytes: Vec<u8> = front.to_le_bytes().into_iter().chain(rest.iter().copied()).collect();
                for len in [bytes.len() as u64, bytes.len() as u64 + u64::from(more)] {
                    parse(&bytes, len);
                }
            }
            parse(&rest, rest.len() as u64);
        }
        Input::Tensors { list, more, change } => written(&list, more, change),
    }
});
