//! Files, up and down.

use std::fs::{File, OpenOptions};
use std::io;
use std::os::unix::fs::OpenOptionsExt;

use crate::support::downloaded;
use pinpool::Error;
use pinpool::copier::{CopyRange, FileSink, FileSource, Fill, Reading, Sink, Source};

use super::{Rig, file_of, pattern, with};
use crate::support::{cold, own_process, skip};

/// What takes no bytes, or none at that place: the error says so, and a file stays as it is.
#[test]
fn a_target_that_takes_no_bytes_is_an_error_that_says_what_to_do() {
    let rig = Rig::late();
    let copier = rig.copier();
    let memory = rig.device.alloc(256 << 10).unwrap();
    let bytes = pattern(512 << 10, 4);
    let (file, pipe) = (file_of(&bytes), Pipe::new());
    // There the system puts bytes at the end, whatever the offset, so threads bring them in any order.
    let journal = OpenOptions::new().append(true).open(file.path()).unwrap();
    let reading = File::open(file.path()).unwrap();
    let far = |at| FileSink::new(file.reopen().unwrap(), "far").at(at);
    for (sink, kind, words) in [
        (
            FileSink::new(journal, "a journal").at(4096),
            Some(io::ErrorKind::InvalidInput),
            "opened for appending",
        ),
        (FileSink::new(reading, "reading"), None, "not open for writing"),
        (far(u64::MAX - 10), Some(io::ErrorKind::InvalidInput), "far"),
        (far(i64::MAX as u64 - 10), Some(io::ErrorKind::InvalidInput), "far"),
        // `download_write` takes one.
        (FileSink::new(pipe.open(), "a pipe"), Some(io::ErrorKind::NotSeekable), "download_write"),
    ] {
        let name = sink.name().into_owned();
        let failed = copier.download(&memory, sink).unwrap().wait().unwrap_err();
        assert!(failed.buffer.is_some());
        let said = failed.error.to_string();
        let Error::Write { what, kind: found, .. } = &failed.error else { panic!("{said}") };
        assert!(
            **what == name && kind.is_none_or(|kind| kind == *found) && said.contains(words),
            "{found}: {said}"
        );
        // Nothing of it is in the way.
        assert!(name != "reading" || !said.contains("remove"), "{said}");
        assert!(name != "a journal" || said.contains("open it for writing"), "{said}");
    }
    assert!(std::fs::read(file.path()).unwrap() == bytes);
    rig.all_is_back();
}

/// A named pipe.
struct Pipe(tempfile::TempDir);

impl Pipe {
    fn new() -> Self {
        let made = Self(tempfile::tempdir().unwrap());
        assert!(std::process::Command::new("mkfifo").arg(made.path()).status().unwrap().success());
        made
    }

    fn path(&self) -> std::path::PathBuf {
        self.0.path().join("pipe")
    }

    /// Both ends, so that opening it does not wait.
    fn open(&self) -> File {
        OpenOptions::new().read(true).write(true).open(self.path()).unwrap()
    }
}

#[test]
fn a_part_of_a_file_can_be_named_again_and_anywhere_in_the_file() {
    let rig = Rig::plain();
    let (copier, bytes, memory) = with(&rig, 4096, 5);
    let file = file_of(&bytes);
    // Behind the first part, before it, around it.
    for (first, second) in [(0..10, 10..20), (5..10, 0..3), (10..20, 0..4096)] {
        let source = FileSource::open(file.path()).unwrap().range(first.clone()).unwrap();
        let source = source.range(second.clone()).unwrap();
        let len = (second.end - second.start) as usize;
        assert_eq!(source.len(), len as u64);
        copier.upload(source, &memory).unwrap().wait().unwrap();
        let part = &bytes[second.start as usize..second.end as usize];
        assert!(downloaded(&copier, memory.slice(..len)) == part, "{first:?} {second:?}");
    }
    #[allow(clippy::reversed_empty_ranges, reason = "that is to be refused")]
    for wrong in [0..4097, 4097..4097, 20..10] {
        let source = FileSource::open(file.path()).unwrap().range(0..10).unwrap();
        let refused = source.range(wrong.clone()).unwrap_err();
        assert!(matches!(&refused, Error::Argument(text) if text.contains("range")), "{wrong:?}: {refused}");
    }
    rig.all_is_back();
}

/// The file opened past the page cache. `None`: its file system refuses that.
fn direct(file: &tempfile::NamedTempFile) -> Option<File> {
    let opened = OpenOptions::new().read(true).write(true).custom_flags(libc::O_DIRECT).open(file.path());
    if opened.is_err() {
        skip!("the file system below {} refuses O_DIRECT", env!("CARGO_TARGET_TMPDIR"));
    }
    opened.ok()
}

/// A file that was opened past the page cache is refused.
#[test]
fn files_go_up_in_every_way_of_reading() {
    let rig = Rig::plain();
    let (copier, bytes, memory) = with(&rig, (3 << 20) + 1234, 1);
    let (file, len) = (file_of(&bytes), bytes.len());
    for reading in [Reading::Auto, Reading::Buffered, Reading::Direct] {
        for range in [0..len, 1..len, 1..len - 2, 4096..len - 1, 70_001..2_000_003] {
            let source = FileSource::open(file.path()).unwrap();
            let source = source.reading(reading).range(range.start as u64..range.end as u64).unwrap();
            if let Err(failed) = copier.upload(source, &memory).unwrap().wait() {
                panic!("{reading:?} {range:?}: {}", failed.error);
            }
            let back = downloaded(&copier, memory.slice(..range.len()));
            assert!(back == bytes[range.clone()], "{reading:?} {range:?}");
            copier.upload_slice(&vec![0; len], &memory).unwrap();
        }
    }
    if let Some(opened) = direct(&file) {
        let refused = FileSource::new(opened, "direct").unwrap_err().to_string();
        assert!(refused.contains("O_DIRECT") && refused.contains("Reading::Direct"), "{refused}");
    }
    let stats = copier.stats();
    let read = stats.cached_bytes + stats.direct_bytes + stats.buffered_bytes;
    assert!(read >= 3 * 4 * 1_900_000, "{stats:?}");
    rig.all_is_back();
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
    match copier.download(&memory, FileSink::new(opened, "direct")).unwrap().wait() {
        // Some file systems take any length.
        Ok(_) => assert!(std::fs::read(file.path()).unwrap() == bytes),
        Err(failed) => {
            let said = failed.error.to_string();
            assert!(said.contains("incomplete") && said.contains("O_DIRECT"), "{said}");
            assert!(matches!(failed.error, Error::Write { offset: 1_048_576, .. }), "{said}");
        }
    }
    rig.all_is_back();
}

#[test]
fn what_has_no_length_is_refused_with_what_to_do() {
    let pipe = Pipe::new();
    let sources = [
        // No process writes to it: to open it would wait.
        FileSource::open(pipe.path()),
        FileSource::new(pipe.open(), "a pipe"),
        FileSource::open("/dev/zero"),
        FileSource::new(File::open("/dev/zero").unwrap(), "zeros"),
    ];
    for source in sources {
        let error = source.unwrap_err();
        let Error::Read { offset: 0, kind: io::ErrorKind::InvalidInput, text, what } = error else {
            panic!("{error}")
        };
        assert!(text.contains("no regular file") && text.contains("upload_read"), "{what}: {text}");
    }
    let error = FileSource::open(pipe.0.path()).unwrap_err();
    assert!(matches!(error, Error::Read { offset: 0, kind: io::ErrorKind::IsADirectory, .. }), "{error}");
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
    // It takes bytes and has no disk.
    let null = OpenOptions::new().write(true).open("/dev/null").unwrap();
    let sink = copier.download(&memory, FileSink::new(null, "null").at(7)).unwrap().wait().unwrap();
    let failed = sink.sync().unwrap_err();
    assert!(matches!(&failed, Error::Write { what, offset: 7, .. } if what == "null"), "{failed}");
    rig.all_is_back();
}

/// A file on a disk that says how much of it is read. `None`: there is none here.
fn disk_file(bytes: &[u8]) -> Option<tempfile::NamedTempFile> {
    let file = file_of(bytes);
    if cold::counts(file.as_file(), file.path()) {
        return Some(file);
    }
    skip!("what is read below {} is not counted, or not past the page cache", env!("CARGO_TARGET_TMPDIR"));
    None
}

/// What else is read meanwhile: what the file system itself looks up.
const BESIDE: u64 = 256 << 10;

#[test]
fn a_cold_file_is_read_once_and_only_buffered_reading_fills_the_page_cache() {
    own_process!();
    let rig = Rig::plain();
    let copier = rig.builder().chunk(1 << 20).share(8 << 20).build().unwrap();
    let bytes = pattern((24 << 20) + 1234, 9);
    let Some(file) = disk_file(&bytes) else { return };
    let memory = rig.device.alloc(bytes.len()).unwrap();
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
    assert_eq!(cold::cached_pages(file.as_file()), pages);
    // What the cache has is read from there, also before it is on the disk.
    assert_eq!(load(Reading::Auto), (0, len, 0));
    file.as_file().set_len(0).unwrap();
    std::fs::write(file.path(), &bytes).unwrap();
    let (read, cached, direct) = load(Reading::Auto);
    assert!(read <= BESIDE, "{read} bytes were read");
    assert_eq!((cached, direct), (len, 0));
    rig.all_is_back();
}

#[test]
fn of_a_file_that_is_partly_cached_the_rest_is_read_and_stays_out_of_the_cache() {
    own_process!();
    let rig = Rig::plain();
    let copier = rig.builder().chunk(4 << 20).share(15 << 20).build().unwrap();
    let bytes = pattern(24 << 20, 10);
    let Some(file) = disk_file(&bytes) else { return };
    let memory = rig.device.alloc(bytes.len()).unwrap();
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
    rig.all_is_back();
}

#[test]
fn short_ranges_of_a_cold_file_are_read_alone() {
    own_process!();
    let rig = Rig::plain();
    let copier = rig.copier();
    let bytes = pattern(24 << 20, 11);
    let Some(file) = disk_file(&bytes) else { return };
    // As the small tensors of a large checkpoint lie.
    let (len, count) = (5000, 24);
    let memory = rig.device.alloc(len * count).unwrap();
    let place = |n: usize| (n << 20) + 70_001;
    let piece = |n: usize| CopyRange::new(place(n) as u64, memory.slice(n * len..(n + 1) * len).unwrap());
    let before = cold::read_bytes();
    let source = FileSource::open(file.path()).unwrap();
    copier.upload(source, (0..count).map(piece).collect::<Vec<_>>()).unwrap().wait().unwrap();
    let read = cold::read_bytes() - before;
    assert!(read <= (count * (len + 2 * 4096)) as u64 + BESIDE, "{read} bytes were read for {}", len * count);
    assert_eq!(cold::cached_pages(file.as_file()), 0);
    let expected: Vec<u8> = (0..count).flat_map(|n| bytes[place(n)..place(n) + len].to_vec()).collect();
    assert!(downloaded(&copier, &memory) == expected);
    rig.all_is_back();
}

/// A program's source that passes a file on.
struct Wrapped(FileSource);

impl Source for Wrapped {
    fn len(&self) -> u64 {
        self.0.len()
    }
    fn fill(&self, offset: u64, into: &mut Fill<'_>) -> io::Result<()> {
        self.0.fill(offset, into)
    }
}

#[test]
fn a_wrapped_part_of_a_file_is_read_from_the_parts_first_byte() {
    let rig = Rig::plain();
    let copier = rig.copier();
    let bytes = pattern(1000, 9);
    let file = file_of(&bytes);
    let memory = rig.device.alloc(100).unwrap();
    let part = || Wrapped(FileSource::open(file.path()).unwrap().range(500..600).unwrap());
    copier.upload(part(), &memory).unwrap().wait().unwrap();
    assert!(downloaded(&copier, &memory) == bytes[500..600]);
    let end = CopyRange::new(90, memory.slice(..10).unwrap());
    copier.upload(part(), vec![end]).unwrap().wait().unwrap();
    assert!(downloaded(&copier, memory.slice(..10)) == bytes[590..600]);
    rig.all_is_back();
}
