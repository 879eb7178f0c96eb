//! Processes that end in the middle of their work, in each way that `tests/support/exits.rs` has.

use crate::support::doubles::{self, ascendcl, npu};
use crate::support::exits::{self, WAYS};
use crate::support::skip;

#[test]
fn a_process_may_end_in_any_way() {
    let test = "a_process_may_end_in_any_way";
    if npu::is_set() {
        return exits::all(test, "acl:0", &WAYS, &[]);
    }
    let Some(library) = doubles::library() else {
        return skip!("the simulated libascendcl is not beside the executable");
    };
    exits::all(test, "acl:0", &WAYS, &[(ascendcl::PATH, library.to_str().expect("a path in UTF-8"))]);
}
