//! Amounts of memory as people write them, in messages and in what the command prints.
//!
//! A whole number of a binary unit has that unit (`64 MiB`), and one below 10 KiB all of its digits
//! (`5000 bytes`). Any other has both (`4.8 MiB (5000000 bytes)`): no two read alike.

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

impl Display for Amount {
    fn fmt(&self, f: &mut Formatter<'_>) -> fmt::Result {
        let bytes = self.0;
        // Each unit is ten bits.
        let unit = (bytes.max(1).ilog2() / 10).min(UNITS.len() as u32);
        let one = 1_u64 << (10 * unit);
        match unit.checked_sub(1).and_then(|unit| UNITS.get(unit as usize)) {
            Some(name) if bytes % one == 0 => write!(f, "{} {name}", bytes / one),
            Some(name) if bytes >= FEW => {
                write!(f, "{:.1} {name} ({bytes} bytes)", bytes as f64 / one as f64)
            }
            _ => write!(f, "{bytes} byte{}", if bytes == 1 { "" } else { "s" }),
        }
    }
}

#[cfg(test)]
#[test]
fn whole_units_are_exact_and_others_have_their_bytes_too() {
    for (bytes, text) in [
        (0, "0 bytes"),
        (1, "1 byte"),
        (1024, "1 KiB"),
        (5000, "5000 bytes"),
        (10_241, "10.0 KiB (10241 bytes)"),
        ((1 << 30) - 1, "1024.0 MiB (1073741823 bytes)"),
        (3 << 29, "1.5 GiB (1610612736 bytes)"),
        (4096 << 40, "4096 TiB"),
    ] {
        assert_eq!(Amount(bytes).to_string(), text, "{bytes}");
    }
}
