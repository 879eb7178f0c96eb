//! The span of a copier's transfer: one for each, with how it went, also where it failed or was cancelled.

use std::io;

use pinpool::copier::{FileSource, Priority, Reading};

use super::*;
use crate::support::downloaded;
use crate::support::process::limit;

const BYTES: usize = 1 << 20;

const BEGUN: [&str; 5] = ["bytes", "device", "direction", "priority", "what"];

/// A bench with 1 MiB of device memory, and a copier of small chunks.
fn rig(priority: Priority) -> (Bench, DeviceSlice, Copier) {
    let bench = Bench::new(|builder| builder);
    let memory = bench.device.alloc(BYTES).unwrap();
    let builder = Copier::builder(&bench.pool, &bench.device).threads(2).chunk(64 << 10).share(512 << 10);
    let copier = builder.build().unwrap().with_priority(priority);
    clear();
    (bench, memory, copier)
}

/// The only transfer so far, which is complete, with these fields besides those that it began with.
fn ended(fields: &[&str]) -> Record {
    let found = spans("pinpool::copier", "transfer");
    let [span] = &found[..] else { panic!("{} transfers: {found:#?}", found.len()) };
    let mut names = [&BEGUN[..], fields].concat();
    names.sort_unstable();
    assert_eq!((span.level, span.names()), (Level::DEBUG, names));
    assert!(span.closed, "{span:?}");
    assert_eq!((span.field("device"), span.field("bytes")), ("host:0", "1048576"));
    assert!(span.field("seconds").parse::<f64>().unwrap() >= 0.0, "{span:?}");
    span.clone()
}

#[test]
fn what_came_through_failed_or_was_cancelled() {
    recorded!();
    let (bench, memory, copier) = rig(Priority::Bulk);
    let caller = tracing::info_span!(target: "pinpool::test", "load").entered();
    let transfer = copier.upload(vec![7; BYTES], &memory).unwrap();
    drop(caller);
    transfer.wait().unwrap();
    let span = ended(&["copied_bytes", "outcome", "seconds"]);
    assert_eq!((span.field("direction"), span.field("priority")), ("upload", "bulk"));
    assert_eq!((span.field("outcome"), span.field("copied_bytes")), ("done", "1048576"));
    assert_eq!(span.within, ["load"], "the caller's own, though threads of the copier did it");
    // All of it is one, however many chunks.
    clear();
    let mut back = vec![0; BYTES];
    copier.with_priority(Priority::Foreground).download_slice(&memory, &mut back).unwrap();
    assert!(back.iter().all(|byte| *byte == 7));
    let span = ended(&["copied_bytes", "outcome", "seconds"]);
    assert_eq!((span.field("direction"), span.field("priority")), ("download", "foreground"));
    // What failed, and what was cancelled.
    clear();
    let file = tempfile::tempfile().unwrap();
    file.set_len(BYTES as u64).unwrap();
    let torn = FileSource::new(file.try_clone().unwrap(), "a torn tape").unwrap();
    file.set_len(BYTES as u64 / 2).unwrap();
    let error = copier.upload(torn, &memory).unwrap().wait().unwrap_err();
    let span = ended(&["copied_bytes", "error", "error.type", "otel.status_code", "outcome", "seconds"]);
    assert_eq!((span.field("outcome"), span.field("what")), ("failed", "a torn tape"));
    assert_eq!(span.field("error"), error.to_string());
    assert_eq!((span.field("error.type"), span.field("otel.status_code")), ("argument", "ERROR"));
    assert!(span.field("copied_bytes").parse::<usize>().unwrap() <= BYTES / 2, "{span:?}");

    clear();
    bench.node.hang(0);
    let transfer = copier.upload(vec![7; BYTES], &memory).unwrap();
    until("under way", || bench.pool.stats().in_flight_bytes > 0);
    transfer.cancel();
    let found = spans("pinpool::copier", "transfer");
    assert!(!found[0].closed, "a chunk is under way still: {found:#?}");
    bench.node.resume(0);
    assert!(matches!(transfer.wait().unwrap_err().error, Error::Cancelled { .. }));
    assert_eq!(ended(&["copied_bytes", "outcome", "seconds"]).field("outcome"), "cancelled");
    // A reader that fails cancels, too.
    clear();
    let broken = std::fs::File::open("/").unwrap();
    copier.upload_read(&mut io::Read::chain(&[1; 1000][..], broken), &memory).unwrap_err();
    until("closed", || spans("pinpool::copier", "transfer").iter().all(|span| span.closed));
    assert_eq!(ended(&["copied_bytes", "outcome", "seconds"]).field("outcome"), "cancelled");
}

/// A server logs at INFO: what it moves for each request is no news, and a load is.
#[test]
fn only_a_large_transfer_is_told_at_info_and_none_that_was_refused() {
    recorded!();
    let bench = Bench::new(|builder| builder);
    let memory = bench.device.alloc(16 << 20).unwrap();
    let copier = Copier::builder(&bench.pool, &bench.device).build().unwrap();
    let levels = || spans("pinpool::copier", "transfer").iter().map(|span| span.level).collect::<Vec<_>>();
    for (len, level) in [(1, Level::DEBUG), ((16 << 20) - 1, Level::DEBUG), (16 << 20, Level::INFO)] {
        clear();
        downloaded(&copier, memory.slice(..len));
        assert_eq!(levels(), [level], "{len}");
    }
    bench.node.kill(0);
    assert!(bench.device.stream().is_err());
    clear();
    assert!(copier.upload(vec![7; BYTES], &memory).unwrap_err().error.is_device_lost());
    assert!(levels().is_empty(), "it was refused, and never was a transfer");
}

/// A file that cannot be opened anew, to be read past the page cache, under a name that would steer a
/// terminal.
#[test]
fn what_a_file_is_called_is_escaped() {
    recorded!();
    let (bench, memory, _) = rig(Priority::Bulk);
    let copier = Copier::builder(&bench.pool, &bench.device).threads(1).chunk(256 << 10).build().unwrap();
    let file = tempfile::tempfile().unwrap();
    file.set_len(BYTES as u64).unwrap();
    let source =
        FileSource::new(Arc::new(file), "a\u{1b}[2J\nERROR forged").unwrap().reading(Reading::Direct);
    let before = limit(libc::RLIMIT_NOFILE, 0);
    let sent = copier.upload(source, &memory).map(|transfer| transfer.wait().is_ok());
    limit(libc::RLIMIT_NOFILE, before);
    assert!(sent.unwrap(), "it is read in another way");
    let (found, spans) = (events("pinpool::copier"), spans("pinpool::copier", "transfer"));
    assert_eq!((found.len(), spans.len()), (1, 1), "{found:#?}");
    assert_eq!(found[0].field("message"), "not read past the page cache");
    let names = [found[0].field("file"), spans[0].field("what")];
    assert_eq!(names, ["a\\u{1b}[2J\\nERROR forged"; 2]);
}
