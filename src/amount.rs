//! Amounts of memory as people write them, in messages and in what the command prints.
//!
//! An amount that is a whole number of a binary unit has that unit (`64 MiB`). Another one has a decimal (`4.8 MiB`; in
//! `1.0 GiB` it says that the amount was rounded), or below 10 KiB all of its digits (`5000 bytes`). The fields of
//! errors and of statistics have the exact number.

use std::fmt::{self, Display, Formatter};

const UNITS: [&str; 4] = ["KiB", "MiB", "GiB", "TiB"];
/// Fewer bytes are told one by one.
const FEW: u64 = 10 << 10;

/// Displays a number of bytes.
pub struct Amount(pub u64);

/// A number of bytes as it is shown.
pub fn amount(bytes: usize) -> Amount {
    Amount(bytes as u64)
}

/// Displays the first number of bytes, which a message sets beside the second one.
pub struct Beside(pub u64, pub u64);

/// A number of bytes as a message shows it that sets it beside `other`: byte by byte where the two differ and would
/// read alike.
pub fn beside(bytes: usize, other: usize) -> Beside {
    Beside(bytes as u64, other as u64)
}

impl Display for Beside {
    fn fmt(&self, f: &mut Formatter<'_>) -> fmt::Result {
        let Self(bytes, other) = *self;
        // In the larger one's unit, and to the decimal that a rounded amount has.
        let one = 1_u64 << (10 * (bytes.max(other).max(1).ilog2() / 10));
        let tenths = |n: u64| (n as f64 / one as f64 * 10.0).round();
        let alike = bytes != other && tenths(bytes) == tenths(other);
        if alike { write!(f, "{bytes} bytes") } else { Amount(bytes).fmt(f) }
    }
}

impl Display for Amount {
    fn fmt(&self, f: &mut Formatter<'_>) -> fmt::Result {
        let bytes = self.0;
        // Each unit is ten bits.
        let unit = (bytes.max(1).ilog2() / 10).min(UNITS.len() as u32);
        let one = 1_u64 << (10 * unit);
        match unit.checked_sub(1).and_then(|unit| UNITS.get(unit as usize)) {
            Some(name) if bytes % one == 0 => write!(f, "{} {name}", bytes / one),
            Some(name) if bytes >= FEW => write!(f, "{:.1} {name}", bytes as f64 / one as f64),
            _ => write!(f, "{bytes} byte{}", if bytes == 1 { "" } else { "s" }),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::{Amount, beside};

    #[test]
    fn whole_units_are_exact_and_others_say_that_they_are_not() {
        for (bytes, text) in [
            (0, "0 bytes"),
            (1, "1 byte"),
            (1023, "1023 bytes"),
            (1024, "1 KiB"),
            (5000, "5000 bytes"),
            (8192, "8 KiB"),
            (10_241, "10.0 KiB"),
            (5_000_000, "4.8 MiB"),
            ((1 << 30) - 1, "1024.0 MiB"),
            (1 << 30, "1 GiB"),
            ((1 << 30) + 1, "1.0 GiB"),
            (3 << 29, "1.5 GiB"),
            (4096 << 40, "4096 TiB"),
        ] {
            assert_eq!(Amount(bytes).to_string(), text, "{bytes}");
        }
    }

    #[test]
    fn amounts_that_would_read_alike_are_told_in_bytes() {
        let shown = |a, b| [beside(a, b).to_string(), beside(b, a).to_string()];
        assert_eq!(shown(1 << 20, (1 << 20) - 32), ["1048576 bytes", "1048544 bytes"]);
        assert_eq!(shown(5_000_000, 5_000_001), ["5000000 bytes", "5000001 bytes"]);
        assert_eq!(shown(1 << 20, 1 << 20), ["1 MiB", "1 MiB"]);
        assert_eq!(shown(1 << 20, 2 << 20), ["1 MiB", "2 MiB"]);
        assert_eq!(shown(0, 4096), ["0 bytes", "4 KiB"]);
        assert_eq!(shown(5_000_000, 1 << 40), ["4.8 MiB", "1 TiB"]);
    }
}
