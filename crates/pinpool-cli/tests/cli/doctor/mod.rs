//! `pinpool doctor` as an operator meets it: the built executable, what it prints, and its exit status.
//!
//! Most conditions are fabricated: a folder that looks like a machine ([`machine`]) stands in for `/proc`, `/sys` and
//! `/dev`, healthy but for one thing, and one check is looked at. The pinning and copying at the end is real all the
//! same. Limits of the process are also set for real.

mod accelerator;
mod limits;
mod machine;
mod memory;
mod output;
mod parse;

use std::path::Path;
use std::process::Command;

use machine::*;
use serde_json::Value;

use crate::support::skip;
#[cfg(feature = "cuda")]
use crate::{doubles, simulation};
use crate::{keys, object, pinpool, stderr, stdout};

/// Every check, in order.
const NAMES: [&str; 9] =
    ["memlock", "memory", "cgroup", "huge-pages", "numa", "device", "pin", "copy", "link"];

/// `pinpool doctor`, without what this process's own environment says about containers and libraries.
fn doctor() -> Command {
    let mut command = pinpool();
    command.arg("doctor");
    for name in [
        "KUBERNETES_SERVICE_HOST",
        "LD_LIBRARY_PATH",
        "PINPOOL_LIBCUDA",
        "PINPOOL_LIBASCENDCL",
        "ASCEND_TOOLKIT_HOME",
        "ASCEND_HOME_PATH",
    ] {
        command.env_remove(name);
    }
    command
}

/// The output of a run with `--json`, once its form and its exit status have been checked.
struct Findings(Value);

fn findings(command: &mut Command) -> Findings {
    let output = command.arg("--json").output().unwrap();
    let (text, errors) = (stdout(&output), stderr(&output));
    assert!(text.lines().count() == 1 && !errors.contains("panicked"), "{command:?}: {text}\n{errors}");
    let value = object(&output);
    assert_eq!(keys(&value), "capacity_bytes checks device measured status");
    let measured = "download_gb_per_s expected_gb_per_s pin_gb_per_s upload_gb_per_s";
    assert_eq!(keys(&value["measured"]), measured);
    let checks = value["checks"].as_array().unwrap();
    let names: Vec<_> = checks.iter().map(|c| c["name"].as_str().unwrap()).collect();
    // A device that cannot be closed is told in one line more.
    assert_eq!(names.strip_suffix(&["close"]).unwrap_or(&names), NAMES);
    for check in checks {
        assert_eq!(keys(check), "fix found name status");
        assert!(!check["found"].as_str().unwrap().is_empty());
        // A report of something wrong says what to do.
        match check["status"].as_str().unwrap() {
            "ok" => assert!(check["fix"].is_null(), "{check}"),
            "warn" | "fail" => assert!(!check["fix"].as_str().unwrap().is_empty(), "{check}"),
            other => panic!("{other}"),
        }
    }
    let worst = ["fail", "warn", "ok"].iter().find(|s| checks.iter().any(|c| c["status"] == **s)).unwrap();
    assert_eq!(value["status"], **worst);
    assert_eq!(output.status.code(), Some(i32::from(*worst == "fail")), "{value}");
    Findings(value)
}

impl Findings {
    fn check(&self, name: &str) -> &Value {
        self.0["checks"].as_array().unwrap().iter().find(|check| check["name"] == name).unwrap()
    }

    /// The check says what is expected of it: `fail: 8 MiB & no CAP_IPC_LOCK => ulimit -l & !docker`. That is the
    /// status, words of what was found, words of the remedies, and one that these do not mention.
    #[track_caller]
    fn is(&self, name: &str, expected: &str) -> &Self {
        let check = self.check(name);
        let (status, words) = expected.split_once(": ").unwrap_or((expected, ""));
        let (found, fix) = words.split_once("=> ").unwrap_or((words, ""));
        assert_eq!(check["status"], status, "{check:#}");
        for (told, words) in [(&check["found"], found), (&check["fix"], fix)] {
            let told = told.as_str().unwrap_or_default();
            for word in words.trim_end().split(" & ") {
                let absent = word.strip_prefix('!');
                let is_as_told = told.contains(absent.unwrap_or(word)) != absent.is_some();
                assert!(is_as_told, "{word:?}: {check:#}");
            }
        }
        self
    }
}
