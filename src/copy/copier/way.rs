//! By which way the bytes of a chunk go between its segment and the device.
//!
//! Copies between one contiguous range on each side run at the link's speed. Many short copies in a batch do not: with
//! 4 KiB each they reach a fifth of it, with 16 KiB half to three quarters, with 64 KiB all of it. One copy to the
//! device ring and a kernel that spreads the bytes there reaches 0.9 of the link with pieces of 1 KiB and more; but the
//! bytes arrive some 20 us later, which is more than a few copies take. (Measured on an H200.)

/// A way.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Way {
    /// A copy for each stretch, in batches.
    Batch,
    /// One copy between the segment and the device ring, and a kernel that spreads or collects the bytes there.
    Ring,
}

/// Stretches that are so long on average are copied at full speed by themselves.
pub(super) const LONG: usize = 48 << 10;
/// So many copies in one batch take no longer than a kernel. One thread at a time submits batches, some microseconds a
/// copy while others copy too, so more of them at the end of a call would last longer than the rest of it.
pub(super) const FEW: usize = 8;

/// The way of a chunk.
pub(super) fn way(stretches: usize, bytes: usize) -> Way {
    if stretches <= FEW || bytes / stretches.max(1) >= LONG { Way::Batch } else { Way::Ring }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    /// The table of ways, printed with `--nocapture`.
    #[test]
    fn table() {
        let mut table = String::new();
        for count in [1, 8, 9, 64, 256, 4096] {
            for len in [64, 1 << 10, 4 << 10, 16 << 10, 48 << 10, 128 << 10] {
                let bytes = count * len;
                if bytes <= 4 << 20 {
                    table += &format!("{count:5} stretches of {len:6} bytes: {:?}\n", way(count, bytes));
                }
            }
        }
        println!("{table}");
        assert_eq!(way(1, 4 << 20), Way::Batch);
        assert_eq!(way(4096, 4 << 20), Way::Ring);
        assert_eq!(way(64, 64 * LONG), Way::Batch);
        assert_eq!(way(FEW + 1, (FEW + 1) * (LONG - 1)), Way::Ring);
    }
}
