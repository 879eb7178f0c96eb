//! Amounts of memory as people write them.

use std::fmt::{self, Display, Formatter};

const UNITS: [&str; 4] = ["KiB", "MiB", "GiB", "TiB"];
/// Fewer bytes are told one by one.
const FEW: u64 = 10 << 10;

/// Displays a number of bytes. A whole number of a binary unit has that unit (`64 MiB`); another
/// amount has a decimal (`4.8 MiB`), or below 10 KiB all of its digits (`5000 bytes`).
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
            Some(name) if bytes >= FEW => write!(f, "{:.1} {name}", bytes as f64 / one as f64),
            _ => write!(f, "{bytes} byte{}", if bytes == 1 { "" } else { "s" }),
        }
    }
}
