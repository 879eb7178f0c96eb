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
//!     println!("{:?} {} {:?}: {:?}", tensor.name(), tensor.dtype(), tensor.shape(), tensor.slice());
//! }
//! # std::fs::remove_dir_all(folder)?;
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
//!
//! # How it works
//!
//! A safetensors file has a header, which gives name, type, shape and place of each tensor, and then the bytes of the
//! tensors without gaps. This loader gives the tensors of a file one block of device memory, side by side and in the
//! file's order. They are then one range on both sides, which the [copier](pinpool::copier) copies in large chunks:
//! copied one by one, small tensors are slow. All files (shards) are queued with the copier at once.
//!
//! Tensors come out in that order, each as soon as its bytes are on the device: for tasks ([`Load::next_tensor`]),
//! threads ([`Load::blocking`]), and many of both that wait for tensors by name ([`Load::take`]). A server with an
//! allocation for each tensor gives the loader their places ([`Loader::places`]). Opening a checkpoint reads the
//! headers and nothing else, and only tensors that are asked for are read.
//!
//! # What is refused
//!
//! A header comes from outside and gives offsets into memory. So it is checked before anything is loaded, and a fault
//! is [`Error::Malformed`], which names the tensor (by its first 200 characters). Refused are:
//!
//! - offsets that run backwards, past the file's end, or into another tensor; bytes that belong to no tensor;
//! - shapes that do not fit the number of bytes, of more elements than any memory holds, or of more than 64 axes;
//! - unknown types; a name that is there twice; a name longer than 65,535 bytes;
//! - a header longer than 100 MB, or than its file; a text of which more than an eighth are opening brackets;
//! - an index that names a tensor which its file does not have, a tensor twice, a file outside of its folder, or more
//!   than 10,000 files;
//! - a folder with several indexes, a folder whose index cannot be read, and a folder without an index that lacks a
//!   file of a numbered set (`model-00002-of-00003.safetensors`).
//!
//! Reading a header or an index that is then refused takes at most two and a half times its bytes of memory, its own
//! bytes included, beside the names of an index's files; one that is accepted, at most five times, until it is read.
//!
//! All files of a checkpoint stay open, so that they are loaded as they were, whatever their names mean by then. A file
//! that was written to after it was opened (its length or its time of modification has changed) is refused by the next
//! load, since its header may be wrong. If it is written to during a load, the load ends with an error in the place of
//! the file's last tensor.
//!
//! Names and metadata come out exactly as the file has them, and may contain anything: newlines, control sequences of a
//! terminal. Show them escaped (`{:?}`), as the errors do.

// This file has what was opened. To read in this order: `json` (serde_json, in place), `header` (what a file says, and
// whether that can be), `index` (which files there are), `load` (where on the device tensors go), `share` (what comes
// out, for many that wait).
//
// Invariants: memory in proportion to a header is asked for by `reserved`, which can be refused; an offset is used only
// after `header` has checked it against the file's length.

mod header;
mod index;
mod json;
mod load;
mod share;

use std::collections::TryReserveError;
use std::fs::{self, File};
use std::io::ErrorKind;
use std::os::unix::fs::{FileExt, MetadataExt};
use std::path::Path;
use std::sync::Arc;

use pinpool::copier::Copier;
use pinpool::{Error, Result};

pub use self::header::{Header, Tensor};
pub use self::load::{DeviceTensor, Loader};
pub use self::share::Load;
#[doc(no_inline)]
pub use ::safetensors::Dtype;

use self::header::{FRONT, Names, Place, START, Table};
use self::index::Index;

/// The most characters of a name that messages show.
const NAME: usize = 200;

/// One file or several, whose headers were read and checked. Nothing is loaded yet. A clone is another handle to it.
#[derive(Clone, Debug)]
pub struct Checkpoint(Arc<Files>);

/// The files of a checkpoint, what their headers say, and all tensors by name.
struct Files {
    shards: Vec<Shard>,
    headers: Vec<Header>,
    names: Names,
}

/// One file, which stays open.
struct Shard {
    file: Arc<File>,
    /// The path as text, for messages.
    name: String,
    /// What the system said of the file when its header was read.
    opened: fs::Metadata,
}

impl Shard {
    /// Opens a file, and reads its header.
    fn open(path: &Path) -> Result<(Self, Table)> {
        let name = path.display().to_string();
        let (file, opened) = open_regular(path, &name)?;
        let table = header::of_file(&file, &name, path, opened.len())?;
        Ok((Self { file: file.into(), name, opened }, table))
    }

    /// An error if the file was written to since its header was read.
    fn unchanged(&self) -> Result<()> {
        let now = self.file.metadata().map_err(|error| unread(&self.name, 0, &error))?;
        let was = &self.opened;
        if now.len() < was.len() {
            let text = format!(
                "it ends there, not at {}: it has become shorter since its length was taken; load it again while no \
                 process writes to it",
                was.len()
            );
            let (what, kind) = (self.name.clone(), ErrorKind::UnexpectedEof);
            return Err(Error::Read { what, offset: now.len(), kind, text });
        }
        let modified = |of: &fs::Metadata| (of.len(), of.mtime(), of.mtime_nsec());
        if modified(&now) != modified(was) {
            let why = "it was written to since it was opened; open it again while no process writes to it";
            return Err(malformed(&self.name, why));
        }
        Ok(())
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

/// Reads so many bytes of a file.
fn read_at(file: &File, what: &str, at: u64, len: usize) -> Result<Vec<u8>> {
    let mut bytes = Vec::new();
    reserved(bytes.try_reserve_exact(len), what, len)?;
    bytes.resize(len, 0);
    file.read_exact_at(&mut bytes, at).map_err(|error| unread(what, at, &error))?;
    Ok(bytes)
}

impl std::fmt::Debug for Files {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_list().entries(self.shards.iter().map(|shard| &shard.name)).finish()
    }
}

impl Checkpoint {
    /// Opens a `.safetensors` file, an index (any `.json` file) with the files that it names, or a folder: the index in
    /// it (`*.safetensors.index.json`, with a variant too: `model.safetensors.index.fp16.json`), or else all of its
    /// `.safetensors` files.
    ///
    /// All files stay open as long as a handle to the checkpoint lives, and a load that reads past the page cache opens
    /// each a second time for as long as the load lives: a checkpoint of many hundred files may need more than the
    /// usual 1,024 (`ulimit -n`).
    ///
    /// # Errors
    /// [`Error::Read`] with the system's reason; [`Error::Malformed`] for a [refused](self) file, index or folder;
    /// [`Error::OutOfMemory`].
    pub fn open(path: impl AsRef<Path>) -> Result<Self> {
        let path = path.as_ref();
        let (files, index) = index::find(path)?;
        Self::of(&files, index.as_ref()).map_err(|error| match index {
            Some(_) => index::incomplete(path, &files, error),
            None => error,
        })
    }

    /// Opens several files that belong together and have no index: all tensors of all of them.
    ///
    /// # Errors
    /// As for [`open`](Self::open), and [`Error::Malformed`] for a tensor that two of them have; [`Error::Argument`]
    /// for no files.
    pub fn open_files<P: AsRef<Path>>(paths: &[P]) -> Result<Self> {
        if paths.is_empty() {
            return Err(Error::Argument("no file was named; name at least one".into()));
        }
        Self::of(paths, None)
    }

    /// Opens files, one at a time, so that a missing one ends it: an index may name thousands.
    fn of<P: AsRef<Path>>(paths: &[P], index: Option<&Index>) -> Result<Self> {
        let opened = paths.iter().map(|path| Shard::open(path.as_ref()));
        let opened = opened.collect::<Result<Vec<_>>>()?;
        let (shards, mut tables): (Vec<_>, Vec<_>) = opened.into_iter().unzip();
        let file = |shard: u32| &*shards[shard as usize].name;
        let mut names = Names::of(file, &tables)?;
        if let Some(index) = index {
            index.choose(&shards, &mut tables, &names)?;
            names = Names::of(file, &tables)?;
        }
        if let Some(((first, _), (second, tensor))) = names.twice(&tables).next() {
            let why = format!("is in {} too: it is there twice; load the files one by one", file(first));
            return Err(blamed(file(second), tables[second as usize].name(tensor), why));
        }
        shards.iter().zip(&mut tables).try_for_each(|(shard, table)| table.read_axes(&shard.name))?;
        let headers = tables.into_iter().map(|table| Header(Arc::new(table))).collect();
        Ok(Self(Arc::new(Files { shards, headers, names })))
    }

    /// The tensors, file by file, in the order in which they lie in the files.
    pub fn tensors(&self) -> impl Iterator<Item = Tensor> {
        self.0.headers.iter().flat_map(Header::tensors)
    }

    /// The tensor of this name.
    #[must_use]
    pub fn get(&self, name: &str) -> Option<Tensor> {
        let (shard, index) = self.0.place(name)?;
        Some(Tensor { table: self.0.headers[shard as usize].0.clone(), index })
    }

    /// The bytes of all tensors; `u64::MAX` if they are more (files may have holes).
    #[must_use]
    pub fn bytes(&self) -> u64 {
        self.tensors().map(|tensor| tensor.bytes()).fold(0, u64::saturating_add)
    }

    /// The metadata of the headers that have it (`__metadata__`), file by file: JSON objects of texts.
    pub fn metadata(&self) -> impl Iterator<Item = &str> {
        self.0.headers.iter().filter_map(Header::metadata)
    }

    /// Starts setting up a load through a copier, of all tensors by default.
    pub fn loader<'a>(&'a self, copier: &'a Copier) -> Loader<'a> {
        Loader::new(self, copier)
    }

    /// Loads one tensor into device memory of its own, and waits for it. `None`: there is none of this name.
    ///
    /// # Errors
    /// As for [`Loader::load`].
    pub fn tensor(&self, copier: &Copier, name: &str) -> Result<Option<DeviceTensor>> {
        let Some((shard, index)) = self.0.place(name) else { return Ok(None) };
        Ok(self.loader(copier).load_chosen(vec![(shard, vec![index])])?.pop())
    }
}

impl Files {
    /// Which file has the tensor of this name, and where.
    fn place(&self, name: &str) -> Option<Place> {
        self.names.get(name, |(shard, tensor)| self.headers[shard as usize].0.name(tensor)).next()
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
        format!("it is a text in the place of the file, and begins \"{}\"; get the file itself", text.trim())
    })
}

/// The start of a text from outside for a message, which shows it escaped: at most `most` characters, and `...` if
/// there are more.
fn shown(text: &str, most: usize) -> String {
    match text.char_indices().nth(most) {
        Some((end, _)) => format!("{}...", &text[..end]),
        None => text.into(),
    }
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
