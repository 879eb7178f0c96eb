//! Processes that end in the middle of their work, in each way that `tests/support/exits.rs` has.

use super::*;
use crate::support::exits::{self, WAYS};

#[test]
fn a_process_may_end_in_any_way() {
    let test = "a_process_may_end_in_any_way";
    if npu::is_set() {
        return exits::all(test, "acl:0", &WAYS, &[]);
    }
    let Some(library) = simulation() else { return };
    exits::all(test, "acl:0", &WAYS, &[(PATH, &library)]);
}
