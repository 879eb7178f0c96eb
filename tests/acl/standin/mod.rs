//! The stand-in libascendcl keeps its rules: each is broken on purpose, and its id is seen.
//!
//! A double shares its author's misreadings, so what it does is written down here call by call, without pinpool in
//! between. Beside the rules: that copies are late, that a call which is told to fail does, that what older libraries
//! lack is not there, and that the report tells all of it.

#![cfg(target_os = "linux")]
#![allow(unsafe_code, reason = "calling a library")]

/// Rules: a test on the stand-in for each, and a list of their names.
macro_rules! rules {
    ($list:ident: $($(#[$doc:meta])* $name:ident ($make:ident) |$acl:ident| $body:block)*) => {
        /// Rules of one topic.
        pub const $list: &[&str] = &[$(stringify!($name)),*];
        $($(#[$doc])* #[test] fn $name() {
            let Some($acl) = $crate::support::doubles::ascendcl::Acl::$make() else { return };
            let $acl = &$acl;
            $body
        })*
    };
}

/// Blocks of rules by topic, and of what the double does beside them.
mod rules {
    pub mod behaviour;
    pub mod contexts;
    pub mod copies;
    pub mod events;
    pub mod host;
    pub mod library;
    pub mod memory;
    pub mod streams;
}

use std::collections::BTreeSet;
use std::path::Path;

use crate::support::skip;
use rules::{contexts, copies, events, host, library, memory, streams};

/// Every rule there is: each block's list.
const ALL: &[&[&str]] = &[
    library::LIBRARY,
    contexts::CONTEXTS,
    streams::STREAMS,
    events::EVENTS,
    memory::MEMORY,
    copies::COPIES,
    host::HOST,
];

/// The id that a test's name begins with: `CTX-5`.
fn id(name: &str) -> String {
    let mut parts = name.split('_');
    let (family, number) = (parts.next().unwrap_or_default(), parts.next().unwrap_or_default());
    format!("{}-{number}", family.to_uppercase())
}

/// The stand-in's page: its rules are those that are broken here.
#[test]
fn the_page_of_the_stand_in_has_these_rules() {
    let page = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/doubles/acl/src/lib.rs");
    let Ok(page) = std::fs::read_to_string(&page) else {
        skip!("{} is not here", page.display());
        return;
    };
    let ids = page.lines().filter_map(|line| line.strip_prefix("//! | ")?.split(' ').next());
    let of_page: BTreeSet<String> =
        ids.filter(|id| id.contains('-') && !id.contains("---")).map(str::to_owned).collect();
    let tested: BTreeSet<String> = ALL.iter().copied().flatten().map(|name| id(name)).collect();
    assert_eq!(of_page, tested, "rules of the page, and tests");
}

/// The files below a folder of this package, as text. `None`: they are not here.
fn sources(folder: &str) -> Option<Vec<String>> {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join(folder);
    let files = std::fs::read_dir(folder).ok()?;
    Some(files.map(|file| std::fs::read_to_string(file.unwrap().path()).unwrap()).collect())
}

/// Whatever looks like an id in quotation marks.
fn quoted(text: &str) -> impl Iterator<Item = String> + '_ {
    text.split('"').filter_map(|word| {
        let (family, number) = word.split_once('-')?;
        let is_id = (3..=4).contains(&family.len()) && family.bytes().all(|b| b.is_ascii_uppercase());
        (is_id && number.parse::<u32>().is_ok()).then(|| word.to_owned())
    })
}

/// The ids that the stand-in writes down are those of the tests, and each test expects its own.
#[test]
fn each_rule_that_is_written_down_has_a_test_that_sees_it() {
    let (Some(double), Some(tests)) = (sources("tests/doubles/acl/src"), sources("tests/acl/standin/rules"))
    else {
        return skip!("the sources are not here");
    };
    let written: BTreeSet<String> = double.iter().flat_map(|text| quoted(text)).collect();
    let tested: BTreeSet<String> = ALL.iter().copied().flatten().map(|name| id(name)).collect();
    assert_eq!(written, tested, "rules of the stand-in, and tests");
    for name in ALL.iter().copied().flatten() {
        // From its own name to the next rule's, or the file's end.
        let head = format!("\n    {name} (");
        let bodies: Vec<&str> =
            tests.iter().filter_map(|text| text.split_once(&head).map(|parts| parts.1)).collect();
        let [rest] = bodies[..] else { panic!("{name} is in {} files", bodies.len()) };
        let body = rest.split_inclusive('\n').take_while(|line| *line != "    }\n");
        let seen: BTreeSet<String> = body.flat_map(|line| quoted(line).collect::<Vec<_>>()).collect();
        assert!(seen.contains(&id(name)), "{name} expects {seen:?}");
    }
}
