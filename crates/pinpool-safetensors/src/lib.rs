//! Checkpoints in the safetensors format: from files to device memory, at the copier's speed.
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
//! A safetensors file has a header, which gives name, type, shape and place of each tensor, and
//! then the tensors' bytes without gaps. Opening a checkpoint reads the headers and nothing else.
//! The tensors of a file get one block of device memory, in the file's order, so that the
//! [copier](pinpool::copier) copies them in large chunks: one by one, small tensors are slow. All
//! files (shards) are queued with the copier at once.
//!
//! Tensors come out in that order, each as soon as its bytes are on the device: for tasks
//! ([`Load::next_tensor`]), threads ([`Load::blocking`]), and many of both that wait for tensors by
//! name ([`Load::take`]). [`Loader::places`] loads into an allocation for each tensor.
//!
//! A program that copies each tensor elsewhere and drops it needs device memory for a part of the
//! checkpoint at a time: [`windows`] splits it. [`Tensor::rows`] is for a program that needs some
//! of the rows of a tensor, as with tensor parallelism.
//!
//! # What is refused
//!
//! A header comes from outside and gives offsets into memory. So it is checked before anything is
//! loaded. A fault is [`Error::Malformed`], with the first 200 characters of the tensor's name.
//! Refused are:
//!
//! - offsets that run backwards, past the file or into another tensor; bytes of no tensor;
//! - shapes that do not fit the number of bytes, of more elements than any memory holds, or of more
//!   than 64 axes;
//! - unknown types; a name that is there twice; a name longer than 65,535 bytes;
//! - a header longer than 100 MB, or than its file; over 65,536 axes, if the header has less than
//!   15 bytes for each; metadata that is no object of texts; a text of which more than an eighth is
//!   opening brackets;
//! - an index that names a tensor which its file does not have, a tensor twice, a file outside of
//!   its folder, or more than 10,000 files;
//! - a folder with several indexes, with an index that cannot be read, or with no index and a gap
//!   in a numbered set of files (`model-00002-of-00003.safetensors`).
//!
//! Reading a header or an index takes at most two and a half times its bytes of memory, itself
//! included, beside an index's file names and a megabyte for axes and messages.
//!
//! All files of a checkpoint stay open, so that they are loaded as they were, whatever their names
//! mean by then. A file whose length or time of modification has changed since it was opened is
//! refused by the next load: its header may be wrong. A change during a load gives an error in the
//! place of the file's last tensor.
//!
//! Names and metadata come out exactly as the file has them, and may contain anything: newlines,
//! control sequences of a terminal. Show them escaped (`{:?}`), as the errors do.

// To read in this order: `json`, `header`, `index`, `load` (where on the device tensors go),
// `share` (what comes out), `windows`. Offsets are used only after `header` has checked them.

mod header;
mod index;
mod json;
mod load;
mod share;
mod windows;

use std::collections::TryReserveError;
use std::fs::{self, File};
use std::io::ErrorKind;
use std::os::unix::fs::{FileExt, MetadataExt, OpenOptionsExt};
use std::path::Path;
use std::sync::Arc;

use pinpool::copier::Copier;
use pinpool::{Error, Result};

pub use self::header::Tensor;
pub use self::load::{DeviceTensor, Loader};
pub use self::share::Load;
pub use self::windows::windows;
#[doc(no_inline)]
pub use ::safetensors::Dtype;

use self::header::{Names, Place, Table};
use self::index::Index;

/// One file or several, whose headers were read and checked. Nothing is loaded yet. A clone is
/// another handle to it.
#[derive(Clone)]
pub struct Checkpoint(Arc<Files>);

/// The files of a checkpoint, what their headers say, and all tensors by name.
struct Files {
    shards: Vec<Shard>,
    tables: Vec<Arc<Table>>,
    names: Names,
}

/// One file, which stays open.
struct Shard {
    file: Arc<File>,
    /// What the system said of the file when its header was read.
    opened: fs::Metadata,
}

impl Files {
    /// Which file has the tensor of this name, and where.
    fn place(&self, name: &str) -> Option<Place> {
        let table = |shard: u32| &self.tables[shard as usize];
        let mut places = self.names.get(name, |(shard, tensor)| table(shard).name(tensor));
        places.find(|(shard, tensor)| table(*shard).entries[*tensor as usize].listed)
    }

    /// An error if a file was written to since its header was read.
    fn unchanged(&self, shard: u32) -> Result<()> {
        let (table, Shard { file, opened }) = (&self.tables[shard as usize], &self.shards[shard as usize]);
        let now = file.metadata().map_err(|error| unread(&table.path, 0, &error))?;
        let modified = |of: &fs::Metadata| (of.len(), of.mtime(), of.mtime_nsec());
        if modified(&now) == modified(opened) {
            return Ok(());
        }
        let why = "it was written to since it was opened; open it again while no process writes to it";
        Err(malformed(&table.what(), why))
    }
}

/// Opens a regular file.
fn open_regular(path: &Path) -> Result<(File, fs::Metadata)> {
    // Without the flag, opening a named pipe would wait for its writer.
    let opened = File::options().read(true).custom_flags(libc::O_NONBLOCK).open(path);
    let file = opened.map_err(|error| unread(path, 0, &error))?;
    let metadata = file.metadata().map_err(|error| unread(path, 0, &error))?;
    match metadata.is_file() {
        true => Ok((file, metadata)),
        false => Err(malformed(&path.display().to_string(), "it is no regular file")),
    }
}

/// Reads so many bytes of a file.
fn read_at(file: &File, path: &Path, at: u64, len: usize) -> Result<Vec<u8>> {
    let mut bytes = Vec::new();
    reserved(bytes.try_reserve_exact(len), &path.display().to_string(), len)?;
    bytes.resize(len, 0);
    file.read_exact_at(&mut bytes, at).map_err(|error| unread(path, at, &error))?;
    Ok(bytes)
}

impl std::fmt::Debug for Checkpoint {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_list().entries(self.0.tables.iter().map(|table| &table.path)).finish()
    }
}

impl Checkpoint {
    /// Opens a `.safetensors` file, an index (any `.json` file) with the files that it names, or a
    /// folder: the index in it (`*.safetensors.index.json`, with a variant too:
    /// `model.safetensors.index.fp16.json`), or else all of its `.safetensors` files.
    ///
    /// All files stay open as long as a handle to the checkpoint lives, and a load that reads past
    /// the page cache opens each a second time for as long as the load lives: a checkpoint of many
    /// hundred files may need more than the usual 1,024 (`ulimit -n`).
    ///
    /// # Errors
    /// [`Error::Read`] with the system's reason; [`Error::Malformed`] for a [refused](self) file,
    /// index or folder; [`Error::OutOfMemory`].
    pub fn open(path: impl AsRef<Path>) -> Result<Self> {
        let (files, index) = index::find(path.as_ref())?;
        Self::of(&files, index.as_ref())
    }

    /// Opens several files that belong together and have no index: all tensors of all of them.
    ///
    /// # Errors
    /// As for [`open`](Self::open), and [`Error::Malformed`] for a tensor that two of them have;
    /// [`Error::Argument`] for no files.
    pub fn open_files<P: AsRef<Path>>(paths: &[P]) -> Result<Self> {
        if paths.is_empty() {
            return Err(Error::Argument("no file was named; name at least one".into()));
        }
        Self::of(paths, None)
    }

    /// Opens files, one at a time, so that a missing one ends it: an index may name thousands.
    fn of<P: AsRef<Path>>(paths: &[P], index: Option<&Index>) -> Result<Self> {
        let (mut shards, mut tables) = (Vec::new(), Vec::new());
        for (number, path) in (0..).zip(paths.iter().map(AsRef::as_ref)) {
            let (file, opened) = open_regular(path)?;
            tables.push(Table::read(&file, path, opened.len(), number)?);
            shards.push(Shard { file: file.into(), opened });
        }
        let names = Names::of(&tables)?;
        if let Some(index) = index {
            index.choose(&mut tables, &names)?;
        }
        names.unique(&tables)?;
        let tables = tables.into_iter().map(Arc::new).collect();
        Ok(Self(Arc::new(Files { shards, tables, names })))
    }

    /// The tensors, file by file, in the order in which they lie in the files.
    pub fn tensors(&self) -> impl Iterator<Item = Tensor> {
        let all = |table: &Arc<Table>, index| Tensor::new(table.clone(), index);
        self.0.tables.iter().flat_map(move |table| table.listed().map(move |index| all(table, index)))
    }

    /// The tensor of this name.
    pub fn get(&self, name: &str) -> Option<Tensor> {
        let (shard, index) = self.0.place(name)?;
        Some(Tensor::new(self.0.tables[shard as usize].clone(), index))
    }

    /// The file that has the tensor of this name, as it was opened: for a map of its bytes. It has
    /// them also where another file took its path.
    ///
    /// # Errors
    /// [`Error::Malformed`] if it was written to since it was opened.
    pub fn file(&self, name: &str) -> Result<Option<&File>> {
        let Some((shard, _)) = self.0.place(name) else { return Ok(None) };
        self.0.unchanged(shard)?;
        Ok(Some(&self.0.shards[shard as usize].file))
    }

    /// The bytes of all tensors; `u64::MAX` if they are more (files may have holes).
    pub fn bytes(&self) -> u64 {
        self.tensors().map(|tensor| tensor.bytes()).fold(0, u64::saturating_add)
    }

    /// The metadata of the headers that have it (`__metadata__`): JSON objects of texts.
    pub fn metadata(&self) -> impl Iterator<Item = &str> {
        self.0.tables.iter().filter_map(|table| table.metadata())
    }

    /// Starts setting up a load through a copier, of all tensors by default.
    pub fn loader<'a>(&'a self, copier: &'a Copier) -> Loader<'a> {
        Loader::new(self, copier)
    }
}

/// What a file begins with, for a message: a failed download may leave an error's text.
fn beginning(start: &[u8]) -> String {
    let start = String::from_utf8_lossy(&start[..start.len().min(64)]);
    format!("begins \"{}\" (`git lfs pull` gets the file of a Git LFS pointer)", start.trim())
}

/// The error for a file that cannot be read.
fn unread(path: &Path, offset: u64, error: &std::io::Error) -> Error {
    let (kind, text) = match error.raw_os_error() {
        // These two have no stable kind of their own.
        Some(libc::EMFILE | libc::ENFILE) => {
            let text = format!("{error}; raise the limit on open files (ulimit -n), or close some");
            (ErrorKind::QuotaExceeded, text)
        }
        _ if error.kind() == ErrorKind::NotFound => {
            (ErrorKind::NotFound, format!("{error}; if the download is incomplete, get the rest"))
        }
        _ => (error.kind(), error.to_string()),
    };
    Error::Read { what: path.display().to_string(), offset, kind, text }
}

fn malformed(what: &str, why: impl Into<String>) -> Error {
    Error::Malformed { what: what.into(), tensor: None, why: why.into() }
}

/// The error for a fault of one tensor.
fn blamed(what: &str, tensor: &str, why: impl Into<String>) -> Error {
    let tensor = Some(format!("{tensor:.200}").into());
    Error::Malformed { what: what.into(), tensor, why: why.into() }
}

/// [`Error::OutOfMemory`] where the system had no memory to reserve. All memory in proportion to a
/// header or an index is reserved through this function.
fn reserved(reserved: Result<(), TryReserveError>, what: &str, bytes: usize) -> Result<()> {
    reserved.map_err(|_| Error::OutOfMemory {
        wanted: bytes,
        text: format!("{what} cannot be read without them; raise the process's memory limit, or free memory"),
    })
}
