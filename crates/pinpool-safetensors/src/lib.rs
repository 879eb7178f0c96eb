//! Checkpoints in the safetensors format: files of tensors to device memory, at the speed of the copier.
//!
//! ```
//! # let folder = std::env::temp_dir().join(format!("pinpool-checkpoint-page-{}", std::process::id()));
//! # std::fs::create_dir_all(&folder)?;
//! # let header = br#"{"model.layers.0":{"dtype":"U8","shape":[4],"data_offsets":[0,4]}}"#;
//! # let file = [&(header.len() as u64).to_le_bytes()[..], header, b"abcd"].concat();
//! # std::fs::write(folder.join("model.safetensors"), file)?;
//! use pinpool::{Copier, Device, Pool, Unpinned};
//! use pinpool_safetensors::Checkpoint;
//!
//! let device = Device::open("host")?; // or "cuda:0"
//! let pool = Pool::builder(&device).capacity(64 << 20).unpinned(Unpinned::Allow).build()?;
//! let copier = Copier::builder(&pool, &device).build()?;
//!
//! let checkpoint = Checkpoint::open(&folder)?; // or a file, or model.safetensors.index.json; reads headers only
//! let layers = checkpoint.loader(&copier).filter(|tensor| tensor.name().starts_with("model.layers."));
//! for tensor in layers.start()?.blocking() {
//!     let tensor = tensor?; // it is on the device; the tensors behind it are being copied
//!     println!("{:?} {} {:?} at {:?}", tensor.name(), tensor.dtype(), tensor.shape(), tensor.address());
//! }
//! # std::fs::remove_dir_all(folder)?;
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
//!
//! # How it works
//!
//! A safetensors file has a header, which gives name, type, shape and place of each tensor, and then the bytes of the
//! tensors without gaps. A loader that copies tensor by tensor is slow when they are small: each copy takes as long as
//! moving a hundred kilobytes. So this loader gives the tensors of a file one block of device memory, in the file's
//! order and side by side, as they are in the file. They are then one range on both sides, and the
//! [copier](pinpool::copier) copies that in large chunks, whatever the sizes of the tensors. Only a tensor whose
//! length is no multiple of the [alignment](Loader::align) has a gap behind it.
//!
//! Tensors come out in the file's order, each as soon as its bytes are on the device, those that are needed
//! [first](Loader::first) before the others. Tasks await them ([`Loading::next_tensor`]), threads iterate over them
//! ([`Loading::blocking`]), and many of both share a load, each of which waits for tensors by name ([`Loading::share`]).
//! All files (shards) are queued with the copier at once, so that it does not idle between two of them. Completion is
//! known by chunks, and a tensor costs time only when it comes out.
//!
//! A server with an allocation for each tensor gives the loader their places ([`Loader::places`]). Long tensors are copied
//! as fast so; short ones are packed on the host and spread on the device.
//!
//! Opening a checkpoint reads the headers and nothing else, and only tensors that are asked for are read.
//! [`Checkpoint::tensor`] loads a single one.
//!
//! # What is refused
//!
//! A header comes from outside and gives offsets into memory. So it is checked before anything is loaded, and a fault
//! is [`Error::Malformed`], which names the tensor (by its first 200 characters). Refused are:
//!
//! - offsets that run backwards, past the file's end, or into another tensor; bytes that belong to no tensor;
//! - shapes that do not fit the number of bytes, of more elements than any memory holds, or of more than 64 axes;
//! - unknown types; a name that is there twice; a name longer than 65,535 bytes;
//! - a header longer than 100 MB, or than its file;
//! - an index that names a tensor which its file does not have, a tensor twice, a file outside of its folder, or more
//!   than 10,000 files;
//! - a folder with several indexes, a folder whose index cannot be read, and a folder without an index that lacks a file
//!   of a numbered set (`model-00002-of-00003.safetensors`).
//!
//! Reading a header or an index that is then refused takes at most two and a half times its bytes of memory, its own
//! bytes included; one that is accepted, at most five times, until it is read. Where the system has no memory for that,
//! the error is [`Error::OutOfMemory`], and names the file.
//!
//! A file that was written to after it was opened (its length or its time of modification has changed) is refused by
//! the next load, since its header may be wrong by now. If it is written to during a load, the load ends with an error
//! in the place of the file's last tensor. A file that replaces an opened one under the same name is another file, and
//! is not read. The first 128 files of a checkpoint stay open, so that they are loaded as they were, whatever their names
//! mean by then. Those behind them are opened again when they are read: replaced by another file, they are refused.
//!
//! Names and metadata come out exactly as the file has them, and may contain anything: newlines, control sequences of a
//! terminal. Show them escaped (`{:?}`), as the errors do.

// This file has what was opened. To read in this order: `json` (serde_json, in place), `header` (what a file says, and
// whether that can be), `index` (which files there are), `load` (the loader, and where on the device tensors go),
// `tensor` and `shared` (what comes out).
//
// Invariants: memory in proportion to a header is asked for by `reserved`, which can be refused; an offset is used only
// after `header` has checked it against the file's length.

mod header;
mod index;
mod json;
mod load;
mod shared;
mod tensor;

use std::collections::TryReserveError;
use std::fs::{self, File};
use std::io::ErrorKind;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use pinpool::copier::Copier;
use pinpool::{Error, Result};

pub use self::header::{Header, Tensor};
pub use self::load::{Loader, Loading};
pub use self::shared::SharedLoad;
pub use self::tensor::DeviceTensor;
#[doc(no_inline)]
pub use ::safetensors::Dtype;

use self::header::{FRONT, Names, START};
use self::index::FoundFiles;

/// The most characters of a name that messages show.
const NAME: usize = 200;
/// The most files of a checkpoint that stay open. A load may open each a second time, and the usual limit is 1,024.
const KEPT_OPEN: usize = 128;

/// One file or several, whose headers were read and checked. Nothing is loaded yet.
///
/// ```
/// # let path = std::env::temp_dir().join(format!("pinpool-checkpoint-{}.safetensors", std::process::id()));
/// # let header = br#"{"a":{"dtype":"U8","shape":[4],"data_offsets":[0,4]}}"#;
/// # std::fs::write(&path, [&(header.len() as u64).to_le_bytes()[..], header, b"abcd"].concat())?;
/// use pinpool_safetensors::{Checkpoint, Dtype};
///
/// let checkpoint = Checkpoint::open(&path)?;
/// assert_eq!((checkpoint.len(), checkpoint.bytes()), (1, 4));
/// let tensor = checkpoint.get("a").expect("the file has it");
/// assert_eq!((tensor.dtype(), tensor.shape()), (Dtype::U8, &[4_usize][..]));
/// # std::fs::remove_file(path)?;
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
pub struct Checkpoint {
    shards: Vec<Arc<Shard>>,
    /// All tensors by name: the shard, and the place there.
    names: Names<(u32, u32)>,
}

/// One file.
#[derive(Debug)]
struct Shard {
    /// `None`: it is opened again when it is read.
    file: Option<Arc<File>>,
    /// The path as text, for messages.
    name: String,
    path: PathBuf,
    /// The stamp of the file when its header was read.
    stamp: Stamp,
    /// In the file's order. Shared with all `DeviceTensor`s of the file.
    tensors: Arc<Vec<Tensor>>,
    metadata: Option<Box<str>>,
}

/// What changes when a file is written to, and what tells it from any other.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Stamp {
    /// The numbers of its file system and of the file there.
    id: (u64, u64),
    len: u64,
    /// The time of the last modification: seconds and nanoseconds.
    modified: (i64, i64),
}

impl Stamp {
    fn of(metadata: &fs::Metadata) -> Self {
        let (id, modified) = ((metadata.dev(), metadata.ino()), (metadata.mtime(), metadata.mtime_nsec()));
        Self { id, len: metadata.len(), modified }
    }
}

impl Shard {
    /// Opens the file that comes behind `before` others.
    fn open(path: &Path, before: usize) -> Result<Self> {
        let name = path.display().to_string();
        let (file, metadata) = open_regular(path, &name)?;
        let stamp = Stamp::of(&metadata);
        let Header { tensors, metadata } = Header::of_file(&file, &name, stamp.len)?;
        let file = (before < KEPT_OPEN).then(|| Arc::new(file));
        let (path, tensors) = (path.to_owned(), Arc::new(tensors));
        Ok(Self { file, name, path, stamp, tensors, metadata })
    }

    /// An error if the file was written to or, where it does not stay open, replaced since its header was read.
    fn unchanged(&self) -> Result<()> {
        let now = match &self.file {
            Some(file) => file.metadata(),
            None => fs::metadata(&self.path),
        };
        self.compare(&now.map_err(|error| unread(&self.name, 0, &error))?)
    }

    fn compare(&self, now: &fs::Metadata) -> Result<()> {
        let now = Stamp::of(now);
        if now.id != self.stamp.id {
            let why = "another file has its name since it was opened; open the checkpoint again";
            return Err(malformed(&self.name, why));
        }
        if now.len < self.stamp.len {
            return Err(Error::Shrunk { what: self.name.clone(), end: now.len, len: self.stamp.len });
        }
        if now != self.stamp {
            let why = "it was written to since it was opened; open it again while no process writes to it";
            return Err(malformed(&self.name, why));
        }
        Ok(())
    }

    /// The file, opened again where it does not stay open.
    fn file(&self) -> Result<Arc<File>> {
        if let Some(file) = &self.file {
            return Ok(file.clone());
        }
        let (file, metadata) = open_regular(&self.path, &self.name)?;
        self.compare(&metadata)?;
        Ok(Arc::new(file))
    }
}

/// Opens a regular file. Checked before, since opening a named pipe would wait for its writer.
fn open_regular(path: &Path, name: &str) -> Result<(File, fs::Metadata)> {
    let unread = |error: std::io::Error| unread(name, 0, &error);
    let no_file = || malformed(name, "it is no regular file");
    let metadata = fs::metadata(path).map_err(|error| match fs::read_link(path) {
        Ok(target) if error.kind() == ErrorKind::NotFound => {
            let text = format!("it is a link to {}, which is missing; get it again", target.display());
            unread(std::io::Error::new(error.kind(), text))
        }
        _ => unread(error),
    });
    if !metadata?.is_file() {
        return Err(no_file());
    }
    let file = File::open(path).map_err(unread)?;
    let metadata = file.metadata().map_err(unread)?;
    if metadata.is_file() { Ok((file, metadata)) } else { Err(no_file()) }
}

impl std::fmt::Debug for Checkpoint {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Checkpoint").field("shards", &self.shards).finish_non_exhaustive()
    }
}

impl Checkpoint {
    /// Opens a `.safetensors` file, an index (any `.json` file) with the files that it names, or a folder: the index in
    /// it (`*.safetensors.index.json`, with a variant too: `model.safetensors.index.fp16.json`), or else all of its
    /// `.safetensors` files.
    ///
    /// # Errors
    /// [`Error::Read`] with the system's reason; [`Error::Malformed`] for a [refused](self) file, index or folder;
    /// [`Error::OutOfMemory`].
    pub fn open(path: impl AsRef<Path>) -> Result<Self> {
        let path = path.as_ref();
        let index = match index::find(path)? {
            FoundFiles::Files(files) => return Self::open_files(&files),
            FoundFiles::Index(index) => index,
        };
        // One path at a time, so that a missing file ends it: an index may name thousands of files.
        let shards = index.paths().enumerate().map(|(number, file)| {
            let mut shard = Shard::open(&file, number).map_err(|error| index.incomplete(path, error))?;
            // Tensors that the index does not name are left out.
            index.keep(number, Arc::make_mut(&mut shard.tensors))?;
            Ok(shard)
        });
        Self::of(shards.collect::<Result<_>>()?)
    }

    /// Opens several files that belong together and have no index: all tensors of all of them.
    ///
    /// # Errors
    /// As for [`open`](Self::open), and [`Error::Malformed`] for a tensor that two of them have; [`Error::Empty`] for
    /// no files.
    pub fn open_files<P: AsRef<Path>>(paths: &[P]) -> Result<Self> {
        if paths.is_empty() {
            return Err(Error::Empty);
        }
        let shards = paths.iter().zip(0..).map(|(path, before)| Shard::open(path.as_ref(), before));
        Self::of(shards.collect::<Result<_>>()?)
    }

    /// Lists all tensors by name.
    fn of(shards: Vec<Shard>) -> Result<Self> {
        let count = shards.iter().map(|shard| shard.tensors.len()).sum();
        let what = shards.first().map_or("", |shard| &shard.name);
        let tensor = |(shard, tensor): (u32, u32)| &shards[shard as usize].tensors[tensor as usize];
        // (Both numbers fit: a header has no room for 2^32 tensors, and no memory has room for 2^32 files.)
        let places =
            (0..).zip(&shards).flat_map(|(s, shard)| (0..shard.tensors.len() as u32).map(move |t| (s, t)));
        let (names, twice) = Names::list(what, places, count, |place| tensor(place).name())?;
        if let Some((one, two)) = twice {
            let [(first, _), (second, _)] = if one < two { [one, two] } else { [two, one] };
            let (other, what) = (&shards[first as usize].name, &shards[second as usize].name);
            let why = format!("is in {other} too: it is there twice; load the files one by one");
            return Err(blamed(what, tensor(one).name(), why));
        }
        Ok(Self { shards: shards.into_iter().map(Arc::new).collect(), names })
    }

    /// The tensors, file by file, in the order in which they lie in the files.
    pub fn tensors(&self) -> impl Iterator<Item = &Tensor> {
        self.shards.iter().flat_map(|shard| shard.tensors.iter())
    }

    /// The tensor of this name.
    #[must_use]
    pub fn get(&self, name: &str) -> Option<&Tensor> {
        self.place(name).map(|(shard, tensor)| &shard.tensors[tensor as usize])
    }

    fn place(&self, name: &str) -> Option<(&Arc<Shard>, u32)> {
        let shard = |shard: u32| &self.shards[shard as usize];
        let found = self.names.get(name, |(s, tensor)| shard(s).tensors[tensor as usize].name());
        found.map(|(s, tensor)| (shard(s), tensor))
    }

    /// The number of tensors.
    #[must_use]
    pub fn len(&self) -> usize {
        self.shards.iter().map(|shard| shard.tensors.len()).sum()
    }

    /// Whether there are none.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// The bytes of all tensors; `u64::MAX` if they are more (files may have holes).
    #[must_use]
    pub fn bytes(&self) -> u64 {
        self.tensors().map(Tensor::len).fold(0, u64::saturating_add)
    }

    /// The metadata of the headers that have it (`__metadata__`), file by file: JSON objects of texts.
    pub fn metadata(&self) -> impl Iterator<Item = &str> {
        self.shards.iter().filter_map(|shard| shard.metadata.as_deref())
    }

    /// The paths of the files, as they were given or found.
    pub fn files(&self) -> impl Iterator<Item = &Path> {
        self.shards.iter().map(|shard| &*shard.path)
    }

    /// The path of the file that has the tensor of this name.
    #[must_use]
    pub fn file_of(&self, name: &str) -> Option<&Path> {
        self.place(name).map(|(shard, _)| &*shard.path)
    }

    /// Starts setting up a load through a copier, of all tensors by default.
    pub fn loader<'a>(&'a self, copier: &'a Copier) -> Loader<'a> {
        Loader::new(self, copier)
    }

    /// Loads one tensor into device memory of its own, and waits for it. `None`: there is none of this name.
    ///
    /// # Errors
    /// As for [`Loader::start`] and [`Loading`]; [`Error::Malformed`] for a file that was written to since it was
    /// opened; [`Error::Unsupported`] on a thread that must not wait (in a waker, a source or a sink).
    pub fn tensor(&self, copier: &Copier, name: &str) -> Result<Option<DeviceTensor>> {
        let Some((shard, place)) = self.place(name) else { return Ok(None) };
        self.loader(copier).only(shard, place).start_waiting()?.next_blocking().transpose()
    }
}

/// What a download leaves in the place of a file, by the file's first bytes. `None`: nothing that is known.
fn stand_in(start: &[u8]) -> Option<String> {
    if start.starts_with(b"version https://git-lfs") {
        return Some(
            "it is a Git LFS pointer in the place of the file; fetch the file itself: git lfs pull".into(),
        );
    }
    let start = start.get(..START).unwrap_or(start);
    let text = start.utf8_chunks().next()?.valid();
    // A character may be cut off at the end. A length in eight bytes is no text: zeros are control characters.
    let is_text = text.len() + 3 >= start.len().max(FRONT + 3)
        && text.chars().all(|c| !c.is_control() || c.is_ascii_whitespace());
    is_text.then(|| {
        let shown = shown(text.trim(), START);
        format!("it is a text in the place of the file, and begins \"{shown}\"; get the file itself")
    })
}

/// The start of a text from outside as a message shows it: escaped, at most `most` characters, and `...` if there are
/// more.
fn shown(text: &str, most: usize) -> String {
    let (mut shown, mut left) = (String::new(), most);
    for character in text.chars() {
        let escaped: String = match character {
            '"' | '\'' | '\\' => character.into(),
            _ => character.escape_debug().collect(),
        };
        let Some(rest) = left.checked_sub(escaped.chars().count()) else {
            shown.push_str("...");
            break;
        };
        shown.push_str(&escaped);
        left = rest;
    }
    shown
}

/// The error for a file that cannot be read.
fn unread(what: &str, offset: u64, error: &std::io::Error) -> Error {
    let (kind, text) = match error.raw_os_error() {
        // These two have no stable kind of their own.
        Some(libc::EMFILE | libc::ENFILE) => {
            let text = format!("{error}; raise the limit on open files (ulimit -n), or close some");
            (ErrorKind::QuotaExceeded, text)
        }
        _ => (error.kind(), error.to_string()),
    };
    Error::Read { what: what.into(), offset, kind, text }
}

fn malformed(what: &str, why: impl Into<String>) -> Error {
    Error::Malformed { what: what.into(), tensor: None, why: why.into() }
}

/// The error for a fault of one tensor.
fn blamed(what: &str, tensor: &str, why: impl Into<String>) -> Error {
    let tensor = Some(shown(tensor, NAME).into());
    Error::Malformed { what: what.into(), tensor, why: why.into() }
}

/// [`Error::OutOfMemory`] where the system had no memory to reserve. All memory in proportion to a header or an index
/// is asked for by way of this function.
fn reserved(reserved: Result<(), TryReserveError>, what: &str, bytes: usize) -> Result<()> {
    reserved.map_err(|_| Error::OutOfMemory {
        wanted: bytes,
        text: format!(
            "{what} cannot be read without them; raise the process's memory limit (ulimit -v, that of its control \
             group), or free memory"
        ),
    })
}
