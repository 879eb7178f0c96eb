//! The simulated library keeps its rules: each is broken on purpose by a script.

mod rules;

use std::collections::BTreeSet;

use pinpool_sim::acl::Library;

use crate::script;
use crate::support::doubles::{self, StandIn};
use crate::support::skip;

/// The page of the simulation lists these rules, and each is broken here.
#[test]
fn each_rule_is_broken_by_a_script() {
    for (name, script) in script::scripts(rules::SCRIPTS) {
        println!("{name}");
        script::Script::run(StandIn::npus(Library::Today), false, &script);
    }
    let broken = rules::SCRIPTS.lines().filter_map(|line| line.split_once(" ! "));
    let broken: BTreeSet<_> = broken.flat_map(|(_, ids)| ids.split(' ')).map(str::to_owned).collect();
    match doubles::rules(3) {
        Some(listed) => assert_eq!(listed, broken),
        None => skip!("the page of the simulation's rules is not here"),
    }
}
