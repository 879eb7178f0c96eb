//! The segment rule: any length up to the end of the address space and any alignment, against a naive form of the same
//! rule (a linear search for the first class that is large enough).
#![no_main]

use arbitrary::Arbitrary;
use libfuzzer_sys::fuzz_target;
use pinpool::Error;

use segment::{CLASSES, Class, LARGEST_CLASS_LEN, MAX_ALIGN, PAGE, Placement, SEGMENT_ALIGN};

/// The crate's own file, which is not part of its public interface.
#[path = "../../src/segment.rs"]
#[allow(dead_code, unexpected_cfgs)]
mod segment;

/// The part of the crate that the file uses.
mod error {
    pub use pinpool::{Error, Result};
}

#[derive(Arbitrary, Debug)]
struct Input {
    lens: [u64; 2],
    align: u64,
    align_shift: u8,
}

/// The rule, by a linear search.
fn rule(len: usize, align: usize) {
    let placement = Placement::of(len, align);
    if !align.is_power_of_two() || align > MAX_ALIGN {
        assert!(matches!(placement, Err(Error::Argument(text)) if text.contains("no alignment")));
        return;
    }
    if len == 0 {
        assert_eq!(placement, Err(Error::ZeroLength));
        assert_eq!(Class::of(len), None);
        return;
    }
    let need = (len as u128).next_multiple_of(32) + 32;
    let first = Class::all().find(|c| c.stride() as u128 >= need);
    assert_eq!(Class::of(len), first, "{len} bytes");
    match placement {
        Ok(Placement::Class(class)) => {
            assert!(align <= SEGMENT_ALIGN && len <= LARGEST_CLASS_LEN);
            assert_eq!(Some(class), first);
            assert_eq!(class.stride() % SEGMENT_ALIGN, 0);
            assert!(class.stride() - 32 >= len);
            if len >= 4096 {
                assert!((class.stride() - len) * 8 <= class.stride(), "{len} bytes lose more than an eighth");
            }
            if len.is_power_of_two() {
                assert!(class.stride() <= len + 64);
            }
        }
        Ok(Placement::Pages { span, align: pages }) => {
            assert!(align > SEGMENT_ALIGN || first.is_none());
            assert_eq!(span as u128, need);
            assert_eq!(segment::span(len), Ok(span));
            assert_eq!(pages, align.div_ceil(PAGE));
            let bytes = Placement::Pages { span, align: pages }.bytes();
            assert!(bytes >= span && bytes < span + PAGE);
            if align <= SEGMENT_ALIGN {
                assert!((bytes - len) * 8 <= bytes);
            }
        }
        Err(Error::TooLong { largest, .. }) => assert!(len > largest && largest > isize::MAX as usize / 2),
        Err(error) => panic!("{len} bytes at {align}: {error}"),
    }
}

fuzz_target!(|input: Input| {
    let Input { lens, align, align_shift } = input;
    for len in lens {
        let len = (len >> (align_shift / 4)) as usize;
        rule(len, align as usize);
        rule(len, 1usize.checked_shl(u32::from(align_shift)).unwrap_or(0));
        rule(len, 64);
        assert_eq!(Class::new(len).is_some(), len < CLASSES);
    }
});
