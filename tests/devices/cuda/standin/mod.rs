//! The simulated libcuda keeps its rules: each is broken on purpose by a script (`script.rs`).
//!
//! A double shares its author's misreadings, so the same scripts run on a real driver where there is one, and
//! the codes are compared; and so are the effects of calls that no code shows.

mod rules;

use std::path::Path;
use std::time::Duration;

use pinpool_sim::cuda::Driver;

use crate::script::{SHORT, Script, are_listed, scripts};
use crate::support::doubles::{self, StandIn};
use crate::support::skip;
use rules::{BEHAVIOUR, EFFECTS, RULES};

/// Which script the child tries, on which library.
const RULE: &str = "PINPOOL_PROBE_RULE";
const LIBRARY: &str = "PINPOOL_PROBE_LIBRARY";
/// Longer than a script takes, the driver's start included.
const LIMIT: Duration = Duration::from_secs(120);

/// The page of the simulation lists these rules, and each is broken here.
#[test]
fn each_rule_is_broken_by_a_script() {
    if doubles::simulated_elsewhere() {
        return;
    }
    let rules = scripts(RULES);
    for (name, script) in [RULES, EFFECTS, BEHAVIOUR].into_iter().flat_map(scripts) {
        println!("{name}");
        Script::run(StandIn::gpus(Driver::Cuda12_8), false, &script);
    }
    are_listed(rules.iter().map(|(id, _)| id.split(' ').next().unwrap()), 2);
    for (name, script) in &rules {
        let id = name.split(' ').next().unwrap();
        assert!(id == "STR-3" || script.contains(&format!(" ! {id}")), "{id} is not broken");
    }
}

/// Every script on the machine's own driver, each in a process of its own, which tells each step before it is
/// made.
#[test]
fn the_rules_on_the_real_driver() {
    const TEST: &str = "the_rules_on_the_real_driver";
    let rules: Vec<_> = [RULES, EFFECTS].into_iter().flat_map(scripts).collect();
    if let (Ok(name), Some(library)) = (std::env::var(RULE), std::env::var_os(LIBRARY)) {
        let (_, script) = rules.iter().find(|rule| rule.0 == name).expect("the parent has the same rules");
        let library = StandIn::any(Path::new(&library)).expect("it was loaded before");
        let ran = Script::run(library, true, script);
        assert!(ran.wrong.is_empty(), "{}", ran.wrong.join("\n"));
        return;
    }
    let (library, text) = match doubles::real_driver() {
        Ok(found) => found,
        Err(why) => {
            skip!("{why}");
            assert!(!doubles::required(), "PINPOOL_REQUIRE names a GPU, and there is none: {why}");
            return;
        }
    };
    let (mut wrong, mut short) = (Vec::new(), 0);
    for (name, _) in rules.iter().filter(|(name, _)| !name.contains(" ? - ")) {
        let library = library.to_str().expect("a path in UTF-8");
        // Kernels are loaded when their module is: the driver's other way is at their first launch, which may
        // wait for whatever runs.
        let environment = [(RULE, *name), (LIBRARY, library), ("CUDA_MODULE_LOADING", "EAGER")];
        let child = doubles::child(TEST, &environment, LIMIT);
        println!("{name}: {}", child.stdout);
        short += usize::from(child.stdout.contains(SHORT));
        if !child.status.is_some_and(|status| status.success()) || !child.stdout.contains("1 passed") {
            wrong.push(format!("{name}: the child {}: {}", child.how(), child.last_words()));
        }
    }
    println!("{TEST}: {} rules, {short} without enough GPUs; {text}", rules.len());
    assert!(short == 0 || !doubles::required_device("cuda:1"), "PINPOOL_REQUIRE names cuda:1");
    assert!(wrong.is_empty(), "{} rules are wrong:\n{}", wrong.len(), wrong.join("\n"));
}

/// The comparison with the simulation in the driver's place: what is made to differ is told, and so is what
/// is listed and does not differ.
#[test]
fn the_comparison_sees_what_differs() {
    if doubles::simulated_elsewhere() {
        return;
    }
    for (line, expected) in [
        ("0 register page 4096", ""),
        ("712 register page 4096", "a difference that is not listed"),
        ("712 register page 4096 ? 0 why", ""),
        ("712 register page 4096 ? 1 why", "not as the list says"),
        ("0 register page 4096 ? 712 why", "the driver does not differ"),
        ("712 register page 4096 ? - why", ""),
    ] {
        let on = StandIn::gpus(Driver::Cuda12_8);
        let mut script = Script::run(on, false, "");
        script.real = true;
        script.line(line);
        let said = script.wrong.join("\n");
        assert!(said.contains(expected) && said.is_empty() == expected.is_empty(), "{line}: {said}");
    }
}
