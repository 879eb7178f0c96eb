//! Files, up and down.

use std::fs::{File, OpenOptions};
use std::os::fd::{AsRawFd, OwnedFd};
use std::os::unix::fs::OpenOptionsExt;

use super::*;
#[cfg(feature = "cuda")]
use crate::support::hand::Machine;
use crate::support::{cold, own_process, skip};

/// What takes no bytes, or none at that place: the error says so, and a file stays as it is.
#[test]
fn a_target_that_takes_no_bytes_is_an_error_that_says_what_to_do() {
    let rig = Rig::late();
    let copier = rig.copier();
    let memory = rig.device.alloc(256 << 10).unwrap();
    let bytes = pattern(512 << 10, 4);
    let (file, (_read, pipe)) = (file_of(&bytes), io::pipe().unwrap());
    // There the system puts bytes at the end, whatever the offset, so threads bring them in any order.
    let journal = OpenOptions::new().append(true).open(file.path()).unwrap();
    let reading = File::open(file.path()).unwrap();
    let full = OpenOptions::new().write(true).open("/dev/full").unwrap();
    let far = |at| FileSink::new(file.reopen().unwrap(), "far").at(at);
    let invalid = Some(io::ErrorKind::InvalidInput);
    for (sink, kind, words) in [
        (FileSink::new(journal, "a journal").at(4096), invalid, ["for appending", "open it for writing"]),
        (FileSink::new(reading, "reading"), None, ["not open for writing"; 2]),
        (far(u64::MAX - 10), invalid, ["far", "no file has such an offset"]),
        (
            FileSink::new(File::from(OwnedFd::from(pipe)), "a pipe"),
            Some(io::ErrorKind::NotSeekable),
            ["a pipe", "download_write"],
        ),
        (FileSink::new(full, "full").at(1 << 30), Some(io::ErrorKind::StorageFull), ["full", "make room"]),
    ] {
        let name = sink.name().into_owned();
        let failed = copier.download(&memory, sink).unwrap().wait().unwrap_err();
        assert!(failed.buffer.is_some());
        let said = failed.error.to_string();
        let Error::Write { what, kind: found, offset, .. } = &failed.error else { panic!("{said}") };
        assert!(**what == name && kind.is_none_or(|kind| kind == *found), "{found}: {said}");
        assert!(words.iter().all(|words| said.contains(words)), "{said}");
        // The place is the file's, wherever the sink begins in it.
        assert!(name != "full" || *offset >= 1 << 30, "{said}");
    }
    assert!(std::fs::read(file.path()).unwrap() == bytes);
}

/// The file opened past the page cache. `None`: its file system refuses that.
fn direct(file: &tempfile::NamedTempFile) -> Option<File> {
    let opened = OpenOptions::new().read(true).write(true).custom_flags(libc::O_DIRECT).open(file.path());
    if opened.is_err() {
        skip!("the file system below {} refuses O_DIRECT", env!("CARGO_TARGET_TMPDIR"));
    }
    opened.ok()
}

/// A part is named again, anywhere in the file. A file that was opened past the page cache is refused.
#[test]
fn parts_of_files_go_up_in_every_way_of_reading() {
    let rig = Rig::plain();
    let (copier, bytes, memory) = with(&rig, (3 << 20) + 1234, 1);
    let (file, len) = (file_of(&bytes), bytes.len());
    let open = || FileSource::open(file.path()).unwrap().range(10..4096).unwrap();
    for range in [0..len, 1..len - 2, 4096..len - 1, 70_001..2_000_003, 0..7] {
        let part = |reading| open().reading(reading).range(range.start as u64..range.end as u64).unwrap();
        let arrives = |up: &dyn Fn(&DeviceSlice)| {
            let place = memory.slice(..range.len()).unwrap();
            copier.upload_slice(&vec![0; range.len()], &place).unwrap();
            up(&place);
            assert!(downloaded(&copier, place) == bytes[range.clone()], "{range:?}");
        };
        for reading in [Reading::Auto, Reading::Buffered, Reading::Direct] {
            assert_eq!(part(reading).len(), range.len() as u64);
            arrives(&|place| drop(copier.upload(part(reading), place).unwrap().wait().unwrap()));
        }
        arrives(&|place| {
            let half = range.len() / 2;
            let halves = [
                CopyRange::new(0, place.slice(..half).unwrap()),
                CopyRange::new(half as u64, place.slice(half..).unwrap()),
            ];
            // By a source of the program's that passes a file on.
            let file = part(Reading::Auto);
            let passes = move |offset, into: &mut Fill<'_>| file.fill(offset, into);
            let source = source("a file's", range.len(), passes);
            let sent = copier.upload(source, halves.to_vec()).unwrap();
            sent.wait().map(drop).map_err(|failed| failed.error).unwrap();
        });
    }
    #[allow(clippy::reversed_empty_ranges, reason = "that is to be refused")]
    for wrong in [0..bytes.len() as u64 + 1, u64::MAX..u64::MAX, 20..10] {
        let refused = open().range(wrong.clone()).unwrap_err();
        assert!(matches!(&refused, Error::Argument(text) if text.contains("range")), "{wrong:?}: {refused}");
    }
    if let Some(opened) = direct(&file) {
        let refused = FileSource::new(opened, "direct").unwrap_err().to_string();
        assert!(refused.contains("O_DIRECT") && refused.contains("Reading::Direct"), "{refused}");
    }
    let stats = copier.stats();
    let read = stats.cached_bytes + stats.direct_bytes + stats.buffered_bytes;
    assert!(read >= 3 * 3 * 1_900_000, "{stats:?}");
}

#[test]
fn a_target_opened_past_the_cache_takes_whole_pages_and_says_what_it_does_not_take() {
    let rig = Rig::plain();
    let (copier, bytes, memory) = with(&rig, (1 << 20) + 1, 7);
    copier.upload_slice(&bytes, &memory).unwrap();
    let file = file_of(&[]);
    let Some(opened) = direct(&file) else { return };
    let sink = FileSink::new(opened.try_clone().unwrap(), "direct");
    copier.download(memory.slice(..1 << 20), sink).unwrap().wait().unwrap();
    assert!(std::fs::read(file.path()).unwrap() == bytes[..1 << 20]);
    // Some file systems take any length.
    if let Err(failed) = copier.download(&memory, FileSink::new(opened, "direct")).unwrap().wait() {
        let said = failed.error.to_string();
        assert!(said.contains("incomplete") && said.contains("O_DIRECT"), "{said}");
        assert!(matches!(failed.error, Error::Write { offset: 1_048_576, .. }), "{said}");
    }
}

#[test]
fn a_file_that_cannot_be_read_is_an_error_that_says_what_to_do() {
    let (rig, (pipe, _)) = (Rig::plain(), io::pipe().unwrap());
    let path = format!("/proc/self/fd/{}", pipe.as_raw_fd());
    for source in [
        // No process writes to it: to open it would wait.
        FileSource::open(path),
        FileSource::new(File::from(OwnedFd::from(pipe)), "a pipe"),
        FileSource::open("/dev/zero"),
        FileSource::new(File::open("/dev/zero").unwrap(), "zeros"),
    ] {
        let error = source.unwrap_err();
        let Error::Read { offset: 0, kind: io::ErrorKind::InvalidInput, text, what } = error else {
            panic!("{error}")
        };
        assert!(text.contains("no regular file") && text.contains("upload_read"), "{what}: {text}");
    }
    let error = FileSource::open("/").unwrap_err();
    assert!(matches!(error, Error::Read { offset: 0, kind: io::ErrorKind::IsADirectory, .. }), "{error}");
    assert!(matches!(FileSource::open("/nonexistent/file"), Err(Error::Read { offset: 0, .. })));
    assert!(matches!(FileSink::create("/nonexistent/file"), Err(Error::Write { offset: 0, .. })));
    let memory = rig.device.alloc(4096).unwrap();
    let of = |file, name| FileSource::new(file, name).unwrap().reading(Reading::Buffered);
    let file = OpenOptions::new().write(true).open(file_of(&[1; 4096]).path()).unwrap();
    let failed = rig.copier().upload(of(file, "write-only"), &memory).unwrap().wait().unwrap_err();
    assert!(matches!(&failed.error, Error::Read { what, .. } if what == "write-only"), "{}", failed.error);
    let empty = rig.copier().upload(of(tempfile::tempfile().unwrap(), "empty"), &memory).unwrap_err();
    assert!(
        matches!(&empty.error, Error::Argument(text) if text.contains("nothing to copy")),
        "{}",
        empty.error
    );
}

#[test]
fn a_download_lands_in_a_file_and_can_be_waited_for_until_it_is_on_the_disk() {
    let rig = Rig::plain();
    let (copier, bytes, memory) = with(&rig, 100_000, 8);
    copier.upload_slice(&bytes, &memory).unwrap();
    let file = file_of(&[]);
    let sink = FileSink::create(file.path()).unwrap().at(5);
    copier.download(&memory, sink).unwrap().wait().unwrap().sync().unwrap();
    let back = std::fs::read(file.path()).unwrap();
    assert!(back[5..] == bytes && back[..5] == [0; 5]);
    // What takes bytes and has no disk.
    let null = OpenOptions::new().write(true).open("/dev/null").unwrap();
    let sink = copier.download(&memory, FileSink::new(null, "null").at(7)).unwrap().wait().unwrap();
    let failed = sink.sync().unwrap_err();
    assert!(matches!(&failed, Error::Write { what, offset: 7, .. } if what == "null"), "{failed}");
}

/// A copier, bytes, a file on a disk with these that says how much of it is read, and device memory for them.
/// `None`: there is no such disk here.
fn on_disk(
    rig: &Rig,
    chunk: usize,
    len: usize,
) -> Option<(Copier, Vec<u8>, tempfile::NamedTempFile, DeviceSlice)> {
    let (_, bytes, memory) = with(rig, len, 9);
    let file = file_of(&bytes);
    if cold::counts(file.as_file(), file.path()) {
        let copier = rig.builder().chunk(chunk).share(15 << 20).build().unwrap();
        return Some((copier, bytes, file, memory));
    }
    skip!("what is read below {} is not counted, or not past the page cache", env!("CARGO_TARGET_TMPDIR"));
    None
}

/// What else is read meanwhile: what the file system itself looks up, and pages that a busy system has
/// taken away from the cache before they were used.
const BESIDE: u64 = 2 << 20;

#[test]
fn a_cold_file_is_read_once_and_only_buffered_reading_fills_the_page_cache() {
    own_process!();
    let rig = Rig::plain();
    let Some((copier, bytes, file, memory)) = on_disk(&rig, 1 << 20, (24 << 20) + 1234) else { return };
    let load = |reading| {
        let before = (cold::read_bytes(), copier.stats());
        let source = FileSource::open(file.path()).unwrap().reading(reading);
        copier.upload(source, &memory).unwrap().wait().unwrap();
        let (read, stats) = (cold::read_bytes() - before.0, copier.stats());
        assert!(downloaded(&copier, &memory) == bytes, "{reading:?}");
        (read, stats.cached_bytes - before.1.cached_bytes, stats.direct_bytes - before.1.direct_bytes)
    };
    let (len, pages) = (bytes.len() as u64, bytes.len().div_ceil(4096));
    for reading in [Reading::Auto, Reading::Direct] {
        let (read, cached, direct) = load(reading);
        assert!(read <= len + BESIDE, "{reading:?}: {read} bytes of {len} were read");
        assert_eq!((cached, direct, cold::cached_pages(file.as_file())), (0, len, 0), "{reading:?}");
    }
    let (read, ..) = load(Reading::Buffered);
    assert!(read <= len + BESIDE, "{read} bytes of {len} were read");
    let few = pages / 16;
    assert!((pages - few..=pages).contains(&cold::cached_pages(file.as_file())));
    // What the cache has is read from there, also before it is on the disk.
    let (read, cached, direct) = load(Reading::Auto);
    assert!(
        read <= BESIDE && cached + direct == len && direct <= few as u64 * 4096,
        "{read} {cached} {direct}"
    );
    file.as_file().set_len(0).unwrap();
    std::fs::write(file.path(), &bytes).unwrap();
    let (read, cached, direct) = load(Reading::Auto);
    assert!(read <= BESIDE, "{read} bytes were read");
    assert_eq!((cached, direct), (len, 0));
}

#[test]
fn of_a_file_that_is_partly_cached_the_rest_is_read_and_stays_out_of_the_cache() {
    own_process!();
    let rig = Rig::plain();
    let Some((copier, bytes, file, memory)) = on_disk(&rig, 4 << 20, 24 << 20) else { return };
    // Whole chunks of it, and a part of one. The kernel reads no more than that into the cache.
    cold::read_nothing_ahead(file.as_file());
    std::os::unix::fs::FileExt::read_exact_at(file.as_file(), &mut vec![0; 10 << 20], 5 << 20).unwrap();
    let warm = cold::cached_pages(file.as_file());
    let before = cold::read_bytes();
    let source = FileSource::open(file.path()).unwrap();
    copier.upload(source, &memory).unwrap().wait().unwrap();
    let (read, stats) = (cold::read_bytes() - before, copier.stats());
    assert!(downloaded(&copier, &memory) == bytes);
    // The kernel may take some of these pages for other files meanwhile.
    let cached = cold::cached_pages(file.as_file());
    assert!((warm - warm / 16..=warm).contains(&cached), "{cached} pages are cached, {warm} were");
    let cold_bytes = bytes.len() as u64 - (warm * 4096) as u64;
    assert!(
        read <= cold_bytes + (1 << 20),
        "{read} bytes were read, {cold_bytes} were not cached: {stats:?}"
    );
    assert_eq!(stats.cached_bytes + stats.direct_bytes, bytes.len() as u64, "{stats:?}");
}

#[test]
fn short_ranges_of_a_cold_file_are_read_alone() {
    own_process!();
    let rig = Rig::plain();
    let Some((copier, bytes, file, memory)) = on_disk(&rig, 64 << 10, 24 << 20) else { return };
    // As the small tensors of a large checkpoint lie.
    let (len, count) = (5000, 24);
    let place = |n: usize| (n << 20) + 70_001;
    let piece = |n: usize| CopyRange::new(place(n) as u64, memory.slice(n * len..(n + 1) * len).unwrap());
    let before = cold::read_bytes();
    let source = FileSource::open(file.path()).unwrap();
    copier.upload(source, (0..count).map(piece).collect::<Vec<_>>()).unwrap().wait().unwrap();
    let read = cold::read_bytes() - before;
    assert!(read <= (count * (len + 2 * 4096)) as u64 + BESIDE, "{read} bytes were read for {}", len * count);
    assert_eq!(cold::cached_pages(file.as_file()), 0);
    let expected: Vec<u8> = (0..count).flat_map(|n| bytes[place(n)..place(n) + len].to_vec()).collect();
    assert!(downloaded(&copier, memory.slice(..len * count)) == expected);
}

/// A worker takes the next load of the same file while its copies of the one before are in flight: between others
/// it waits for them, since a file that blocks would hold them up.
#[cfg(feature = "cuda")]
#[test]
fn loads_of_one_file_follow_each_other_without_a_pause() {
    let machine = Machine::new(1, 32 << 20, 1);
    let device = machine.device(0);
    let pool = crate::builder(&device, 4 << 20).build().unwrap();
    let copier = Copier::builder(&pool, &device).build().unwrap();
    let written = [5, 6].map(|seed| file_of(&pattern(8192, seed)));
    let [file, other] = written.each_ref().map(|file| Arc::new(file.reopen().unwrap()));
    let upload = |file: &Arc<File>| {
        let source = FileSource::new(file.clone(), "a file").unwrap();
        copier.upload(source, device.alloc(8192).unwrap()).unwrap()
    };
    let mut transfers = Vec::new();
    let in_flight = [&file, &file, &other].map(|file| {
        transfers.push(upload(file));
        pool.stats().in_flight_bytes
    });
    assert!(in_flight[0] > 0 && in_flight[1..] == [2 * in_flight[0]; 2], "{in_flight:?}");
    for transfer in transfers {
        transfer.wait().unwrap();
    }
}
