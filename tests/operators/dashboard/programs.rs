//! Finding programs that may be missing, and running them within bounds.

use std::io::Read;
use std::path::PathBuf;
use std::process::{Command, Output, Stdio};
use std::time::Instant;

use super::PATIENCE;
use crate::support::skip;

/// Where the first of these programs is. Without it the test is skipped and says so, or fails where `PINPOOL_REQUIRE`
/// names `kind`.
pub fn find(kind: &str, names: &[&str]) -> Option<PathBuf> {
    let path = std::env::var_os("PATH").unwrap_or_default();
    let found = names.iter().find_map(|name| {
        std::env::split_paths(&path).map(|folder| folder.join(name)).find(|program| program.is_file())
    });
    if found.is_none() {
        let required = std::env::var("PINPOOL_REQUIRE").unwrap_or_default();
        assert!(
            !required.split(',').any(|name| name.trim() == kind),
            "PINPOOL_REQUIRE names {kind}, and none of {names:?} is in PATH"
        );
        skip!("none of {names:?} is in PATH ({kind})");
    }
    found
}

/// Runs it to its end, and kills it if that does not come.
pub fn run(command: &mut Command) -> Output {
    let mut child =
        command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    let mut pipes: [Box<dyn Read + Send>; 2] =
        [Box::new(child.stdout.take().unwrap()), Box::new(child.stderr.take().unwrap())];
    let readers = pipes.each_mut().map(|pipe| {
        let mut pipe = std::mem::replace(pipe, Box::new(std::io::empty()));
        std::thread::spawn(move || {
            let mut text = Vec::new();
            pipe.read_to_end(&mut text).map(|_| text)
        })
    });
    let start = Instant::now();
    let status = loop {
        if let Some(status) = child.try_wait().unwrap() {
            break status;
        }
        if start.elapsed() > PATIENCE {
            child.kill().unwrap();
            child.wait().unwrap();
            panic!("{command:?} does not end");
        }
        std::thread::sleep(std::time::Duration::from_millis(20));
    };
    let [stdout, stderr] = readers.map(|reader| reader.join().unwrap().unwrap());
    Output { status, stdout, stderr }
}
