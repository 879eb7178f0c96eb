//! Checkpoints in the safetensors format: files of tensors to device memory, at the speed of the pipeline.
//!
//! ```no_run
//! use pinpool::pipeline::Pipeline;
//! use pinpool::safetensors::Checkpoint;
//! use pinpool::{Device, Pool};
//!
//! let device = Device::open("auto")?;
//! let pool = Pool::builder(&device).capacity(512 << 20).build()?;
//! let pipeline = Pipeline::builder(&pool, &device).build()?;
//!
//! let checkpoint = Checkpoint::open("model/")?; // or a file, or model.safetensors.index.json; reads headers only
//! for tensor in checkpoint.loader(&pipeline).prefix("model.layers.").start()? {
//!     let tensor = tensor?; // it is on the device; those behind it are on their way
//!     println!("{:?} {} {:?} at {:?}", tensor.name(), tensor.dtype(), tensor.shape(), tensor.address());
//! }
//! # Ok::<(), pinpool::Error>(())
//! ```
//!
//! # How it works
//!
//! The format is a header, which says of each tensor its name, type, shape and place, and then the tensors' bytes
//! without gaps. A loader that copies tensor by tensor is slow when they are small: each copy costs as much as moving a
//! hundred kilobytes. So here the tensors of a file get one block of device memory, in the file's order, side by side
//! as they are in the file; then they are one range on both sides, and the [pipeline](crate::pipeline) copies that in
//! its own large chunks, whatever the tensors' sizes. Only a tensor whose length is no multiple of the
//! [alignment](Loader::align) leaves a gap behind it.
//!
//! Tensors come in the file's order, the first as soon as it has landed: a [`Loading`] is an iterator for threads, and
//! an async stream. All shards are queued with the pipeline at once, so that it never runs dry between two files. What
//! is on the way is known chunk by chunk, and a tensor is looked at when it is handed out, not before: 16,384 tensors
//! of 16 KiB are on the wire for 5 ms, so a microsecond for each would cost three times that.
//!
//! Opening reads the headers and nothing else; what is not asked for is not read. One tensor alone:
//! [`Checkpoint::tensor`].
//!
//! # What is refused
//!
//! A header is a stranger's claim about offsets into memory. Whatever is wrong with one is [`Error::Malformed`], which
//! names the tensor (by its first 200 characters), and is found before anything is loaded: offsets that run backwards,
//! past the file's end or into another tensor, bytes that belong to none, shapes whose elements do not come to as many
//! bytes (or to more than any memory holds), shapes of more than 64 axes, types that nobody knows, a name that comes
//! twice, headers longer than 100 MB or than their file, names longer than 65,535 bytes, an index that names tensors
//! which its files do not have, a tensor twice, files outside of its folder, or more than 10,000 files. A folder whose
//! index cannot be read is refused, not loaded without it; one that has none must have all files of a set that counts
//! them in its names (`model-00002-of-00003.safetensors`).
//!
//! What is refused costs little more than it is long: at most two and a half times the bytes of its header or index,
//! these included. (One that is accepted: at most five times, for as long as it is read.) Where the system refuses
//! that, it is [`Error::OutOfMemory`], which names the file.
//!
//! Names and metadata come out exactly as the file has them, and may be any text: what steers a terminal, a newline.
//! Show them escaped (`{:?}`). In this crate's errors and events they are.
//!
//! A file that is written to after it was opened (its length or its time of modification tells) is refused by the next
//! load, and one that is written to during a load ends that with an error in the place of its last tensor: its header
//! may not be true any more. A file that takes the place of an opened one is another file, and not looked at.
//!
//! # Checksums
//!
//! A tensor's checksum is the XXH3 of 128 bits, without seed or secret, of its bytes in the file's order, and nothing
//! else: not of its name, type or shape. In hexadecimal (`{:032x}`) it is what `xxhsum -H128` prints of the same bytes.
//! It finds damage, and does not keep out anyone who means harm.
//!
//! [`Loader::checksums`] has it taken of each tensor's bytes as they are read, on the pipeline's threads;
//! [`device_checksums`] takes the same of what is on the device, by bringing it back, and [`Checkpoint::file_checksum`]
//! of what is in the file now.
//!
//! # Modules
//!
//! Here is what was opened. `header`: what a file says, and whether that can be. `index`: which files there are.
//! `json`: the reader of both, which allocates nothing. `load`: the loader, and where on the device tensors go.
//! `tensor`: what comes out. `sums`: checksums.

mod header;
mod index;
mod json;
mod load;
mod sums;
mod tensor;

use std::collections::{HashMap, HashSet, TryReserveError};
use std::fmt::Display;
use std::fs::{self, File};
use std::ops::Range;
use std::os::unix::fs::{FileExt, MetadataExt};
use std::path::{Path, PathBuf};
use std::sync::Arc;

pub use self::header::{Header, Metadata, Tensor};
pub use self::load::{LoadCanceller, Loader, Loading};
pub use self::tensor::{DeviceTensor, device_checksums};
pub use ::safetensors::Dtype;

use self::header::HeaderKey;
use self::load::Chosen;
use self::sums::Hasher;
use crate::copy::pipeline::Pipeline;
use crate::error::{Error, Result};
use crate::escape::{NAME, Shown};

/// Bytes that are read at a time for a checksum.
const READ_BLOCK: usize = 1 << 20;

/// One file or several, whose headers were read and found right. The files stay open; nothing is loaded yet.
#[derive(Debug)]
pub struct Checkpoint {
    shards: Vec<Arc<Shard>>,
    /// Of each tensor: its shard, and its place there.
    names: HashMap<HeaderKey, (u32, u32)>,
}

/// One file.
#[derive(Debug)]
struct Shard {
    file: Arc<File>,
    /// For messages: a path need not be text.
    name: String,
    path: PathBuf,
    /// When its header was read.
    stamp: Stamp,
    /// In the file's order. Shared with all that were handed out.
    tensors: Arc<Vec<Tensor>>,
    /// Where their bytes are, if they lie side by side and each has a multiple of so many bytes, a power of two: then
    /// they can go to the device as they are.
    whole: Option<(Range<u64>, usize)>,
    metadata: Metadata,
}

/// What changes when a file is written to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Stamp {
    len: u64,
    /// Time of its last modification: seconds, and nanoseconds.
    modified: (i64, i64),
}

impl Stamp {
    fn of(metadata: &fs::Metadata) -> Self {
        Self { len: metadata.len(), modified: (metadata.mtime(), metadata.mtime_nsec()) }
    }
}

impl Shard {
    fn open(path: &Path) -> Result<Self> {
        let name = path.display().to_string();
        let (file, metadata) = open_regular(path, &name)?;
        let stamp = Stamp::of(&metadata);
        let Header { tensors, metadata } = Header::of_file(&file, &name, stamp.len)?;
        let whole = side_by_side(&tensors);
        let (file, path, tensors) = (Arc::new(file), path.to_owned(), Arc::new(tensors));
        Ok(Self { file, name, path, stamp, tensors, whole, metadata })
    }

    /// An error if the file is not what it was when its header was read.
    fn unchanged(&self) -> Result<()> {
        let now = Stamp::of(&self.file.metadata().map_err(|error| unread(&self.name, 0, &error))?);
        if now.len < self.stamp.len {
            return Err(Error::Shrunk { what: self.name.clone(), end: now.len, len: self.stamp.len });
        }
        if now != self.stamp {
            let why = "it was written to since it was opened; open it again, and let nobody write to it";
            return Err(malformed(&self.name, why));
        }
        Ok(())
    }
}

/// See [`Shard::whole`].
fn side_by_side(tensors: &[Tensor]) -> Option<(Range<u64>, usize)> {
    let mut lens = 0;
    let mut whole: Option<Range<u64>> = None;
    for tensor in tensors.iter().filter(|tensor| !tensor.is_empty()) {
        lens |= tensor.len();
        let range = tensor.range();
        match &mut whole {
            Some(whole) if whole.end == range.start => whole.end = range.end,
            Some(_) => return None,
            None => whole = Some(range),
        }
    }
    // (Beyond 2^31 nobody asks.)
    Some((whole?, 1 << lens.trailing_zeros().min(31)))
}

/// Opens a file, if it is one: opening a named pipe would wait.
fn open_regular(path: &Path, name: &str) -> Result<(File, fs::Metadata)> {
    let unread = |error: std::io::Error| unread(name, 0, &error);
    let no_file = || malformed(name, "it is no regular file");
    if !fs::metadata(path).map_err(unread)?.is_file() {
        return Err(no_file());
    }
    let file = File::open(path).map_err(unread)?;
    let metadata = file.metadata().map_err(unread)?;
    if metadata.is_file() { Ok((file, metadata)) } else { Err(no_file()) }
}

impl Checkpoint {
    /// Opens a `.safetensors` file, an index (`model.safetensors.index.json`) with the files that it names, or a
    /// folder: the index in it, or else all of its `.safetensors` files.
    ///
    /// # Errors
    /// [`Error::Read`] with what the system says; [`Error::Malformed`] for what is not what it says it is.
    pub fn open(path: impl AsRef<Path>) -> Result<Self> {
        let path = path.as_ref();
        let index = match index::find(path)? {
            FoundFiles::Files(files) => return Self::open_files(&files),
            FoundFiles::Index(index) => index,
        };
        // One path at a time: an index may name thousands of files that are not there.
        let shards = index.files().iter().map(|file| Shard::open(&index.path(file)));
        let mut shards: Vec<Shard> = shards.collect::<Result<_>>()?;
        // The index says which tensors there are.
        let mut count = 0;
        for (shard, file) in shards.iter_mut().zip(index.files()) {
            let mut tensors = std::mem::take(&mut shard.tensors);
            Arc::make_mut(&mut tensors).retain(|tensor| index.says(tensor.name(), file));
            count += tensors.len();
            shard.whole = side_by_side(&tensors);
            shard.tensors = tensors;
        }
        if count < index.len() {
            return Err(missing(&path.display().to_string(), &index, &shards, count));
        }
        Self::of(shards)
    }

    /// Opens several files that belong together, with no index: all tensors of all of them.
    ///
    /// # Errors
    /// As for [`open`](Self::open), and [`Error::Malformed`] for a tensor that two of them have; [`Error::Empty`]
    /// without files.
    pub fn open_files<P: AsRef<Path>>(paths: &[P]) -> Result<Self> {
        Self::of(Self::open_shards(paths)?)
    }

    fn open_shards<P: AsRef<Path>>(paths: &[P]) -> Result<Vec<Shard>> {
        if paths.is_empty() {
            return Err(Error::Empty);
        }
        paths.iter().map(|path| Shard::open(path.as_ref())).collect()
    }

    /// Lists all tensors by name.
    fn of(shards: Vec<Shard>) -> Result<Self> {
        let count = shards.iter().map(|shard| shard.tensors.len()).sum();
        let mut names: HashMap<HeaderKey, (u32, u32)> = HashMap::new();
        let what = shards.first().map_or("", |shard| &shard.name);
        room(names.try_reserve(count), what, count.saturating_mul(size_of::<(HeaderKey, (u32, u32))>()))?;
        for (s, shard) in shards.iter().enumerate() {
            for (t, tensor) in shard.tensors.iter().enumerate() {
                // (A header has no room for more than that, and memory none for so many files.)
                let Some((other, _)) = names.insert(tensor.key(), (s as u32, t as u32)) else {
                    continue;
                };
                if other as usize == s {
                    return Err(header::twice(&shard.name, tensor.name()));
                }
                let why = format!("is in {} too; load them one by one", shards[other as usize].name);
                return Err(blamed(&shard.name, &tensor.name(), why));
            }
        }
        Ok(Self { shards: shards.into_iter().map(Arc::new).collect(), names })
    }

    /// What there is, shard by shard, in the order in which it lies in the files.
    pub fn tensors(&self) -> impl Iterator<Item = &Tensor> {
        self.shards.iter().flat_map(|shard| shard.tensors.iter())
    }

    /// The tensor of that name.
    #[must_use]
    pub fn get(&self, name: &str) -> Option<&Tensor> {
        self.place(name).map(|(shard, tensor)| &shard.tensors[tensor as usize])
    }

    fn place(&self, name: &str) -> Option<(&Arc<Shard>, u32)> {
        self.names.get(name).map(|&(shard, tensor)| (&self.shards[shard as usize], tensor))
    }

    /// How many tensors there are.
    #[must_use]
    pub fn len(&self) -> usize {
        self.names.len()
    }

    /// Whether there are none.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.names.is_empty()
    }

    /// Bytes of all tensors; `u64::MAX` for more, of files with holes.
    #[must_use]
    pub fn bytes(&self) -> u64 {
        self.tensors().map(Tensor::len).fold(0, u64::saturating_add)
    }

    /// What the headers say beside tensors (`__metadata__`), shard by shard: text that nobody has checked.
    pub fn metadata(&self) -> impl Iterator<Item = (&str, &str)> {
        self.shards.iter().flat_map(|shard| shard.metadata.iter())
    }

    /// The files, as they were named or found.
    pub fn files(&self) -> impl Iterator<Item = &Path> {
        self.shards.iter().map(|shard| &*shard.path)
    }

    /// Starts setting up a load through a pipeline. All tensors, unless told.
    pub fn loader<'a>(&'a self, pipeline: &'a Pipeline) -> Loader<'a> {
        Loader::new(self, pipeline)
    }

    /// Loads one tensor, into memory of its own, and waits for it. `None`: there is none of that name.
    ///
    /// # Errors
    /// As for [`Loader::start`] and [`Loading`]; [`Error::Malformed`] for a file that was written to since it was
    /// opened.
    pub fn tensor(&self, pipeline: &Pipeline, name: &str) -> Result<Option<DeviceTensor>> {
        let Some((shard, place)) = self.place(name) else { return Ok(None) };
        let choose =
            |s: &Shard| Chosen::Some(if std::ptr::eq(s, &**shard) { vec![place] } else { Vec::new() });
        self.loader(pipeline).start_with(choose)?.0.next().transpose()
    }

    /// The XXH3 (128 bits) of a tensor's bytes as they are in the file now, read on the caller's thread. `None`: there
    /// is none of that name.
    ///
    /// # Errors
    /// [`Error::Read`]; [`Error::Shrunk`] for a file that has become shorter.
    pub fn file_checksum(&self, name: &str) -> Result<Option<u128>> {
        let Some((shard, place)) = self.place(name) else { return Ok(None) };
        let range = shard.tensors[place as usize].range();
        let mut hasher = Hasher::default();
        let mut block = vec![0; (range.end - range.start).min(READ_BLOCK as u64) as usize];
        let mut at = range.start;
        while at < range.end {
            let part = (range.end - at).min(READ_BLOCK as u64) as usize;
            shard.file.read_exact_at(&mut block[..part], at).map_err(|error| match error.kind() {
                std::io::ErrorKind::UnexpectedEof => {
                    let end = shard.file.metadata().map_or(at, |m| m.len());
                    Error::Shrunk { what: shard.name.clone(), end, len: shard.stamp.len }
                }
                _ => unread(&shard.name, at, &error),
            })?;
            hasher.update(&block[..part]);
            at += part as u64;
        }
        Ok(Some(hasher.digest()))
    }
}

fn unread(what: &str, offset: u64, error: &std::io::Error) -> Error {
    Error::Read { what: what.into(), offset, kind: error.kind(), text: error.to_string() }
}

fn malformed(what: &str, why: impl Into<String>) -> Error {
    Error::Malformed { what: what.into(), tensor: None, why: why.into() }
}

/// What is wrong with one tensor.
fn blamed(what: &str, tensor: &dyn Display, why: impl Into<String>) -> Error {
    let tensor = Some(Shown(tensor, NAME).to_string().into());
    Error::Malformed { what: what.into(), tensor, why: why.into() }
}

/// An error where the system has no memory for reading a header or an index.
fn room(reserved: Result<(), TryReserveError>, what: &str, bytes: usize) -> Result<()> {
    reserved.map_err(|_| Error::OutOfMemory {
        wanted: bytes,
        text: format!(
            "{what} cannot be read without them; raise the process's memory limit (ulimit -v, that of its control group), or \
             free memory"
        ),
    })
}

/// Which of an index's tensors its files lack, of which they have so many.
fn missing(what: &str, index: &index::Index, shards: &[Shard], count: usize) -> Error {
    let mut have: HashSet<(&str, &str)> = HashSet::new();
    if let Err(error) = room(have.try_reserve(count), what, count.saturating_mul(size_of::<(&str, &str)>())) {
        return error;
    }
    for (shard, file) in shards.iter().zip(index.files()) {
        have.extend(shard.tensors.iter().map(|tensor| (tensor.name(), &**file)));
    }
    match index.first_not(|tensor, file| have.contains(&(tensor, file))) {
        Some((tensor, file)) => {
            let path = index.path(&file.get());
            let why = format!("is said to be in {}, which does not have it; get both again", path.display());
            blamed(what, &header::Meant(tensor), why)
        }
        None => malformed(what, "its files do not have what it names; get all of it again"),
    }
}

/// What a path stands for.
enum FoundFiles {
    Files(Vec<PathBuf>),
    Index(index::Index),
}
