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
//!     println!("{} {} {:?} at {:?}", tensor.name(), tensor.dtype(), tensor.shape(), tensor.address());
//! }
//! # Ok::<(), pinpool::Error>(())
//! ```
//!
//! # How it works
//!
//! The format is a header, which says of each tensor its name, type, shape and place, and then the tensors' bytes without
//! gaps. A loader that copies tensor by tensor is slow when they are small: each copy costs as much as moving a hundred
//! kilobytes. So here the tensors of a file get one block of device memory, in the file's order, side by side as they are in
//! the file; then they are one range on both sides, and the [pipeline](crate::pipeline) copies that in its own large
//! chunks, whatever the tensors' sizes. Only a tensor whose length is no multiple of the
//! [alignment](Loader::align) leaves a gap behind it.
//!
//! Tensors come in the file's order, the first as soon as it has landed: a [`Loading`] is an iterator for threads, and an
//! async stream. All shards are queued with the pipeline at once, so that it never runs dry between two files.
//!
//! Opening reads the headers and nothing else; what is not asked for is not read. One tensor alone:
//! [`Checkpoint::tensor`].
//!
//! # What is refused
//!
//! A header is a stranger's claim about offsets into memory. Whatever is wrong with one is
//! [`Error::Malformed`], which names the tensor, and is found before anything is loaded: offsets
//! that run backwards, past the file's end or into another tensor, bytes that belong to none, shapes whose elements do not
//! come to as many bytes (or to more than any memory holds), types that nobody knows, headers longer than 100 MB or than
//! their file, an index that names tensors which its files do not have, or files outside of its folder.
//!
//! # Checksums
//!
//! [`Loader::checksums`] has the XXH3 (128 bits) taken of each tensor's bytes as they are read, on the pipeline's threads;
//! [`device_checksums`] takes the same of what is on the device, by bringing it back, and [`Checkpoint::file_checksum`] of
//! what is in the file now.
//!
//! # Modules
//!
//! Here is what was opened. `header`: what a file says, and whether that can be. `index`: which files there are.
//! `load`: the loader, and where on the device tensors go. `tensor`: what comes out. `sums`: checksums.

mod header;
mod index;
mod load;
mod sums;
mod tensor;

use std::collections::HashMap;
use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;

pub use self::header::{Header, Tensor};
pub use self::load::{LoadCanceller, Loader, Loading};
pub use self::tensor::{DeviceTensor, device_checksums};
pub use ::safetensors::Dtype;

use self::sums::Hasher;
use crate::copy::pipeline::Pipeline;
use crate::error::{Error, Result};

/// Bytes that are read at a time for a checksum.
const BLOCK: usize = 1 << 20;

/// One file or several, whose headers were read and found right. The files stay open; nothing is loaded yet.
#[derive(Debug)]
pub struct Checkpoint {
    shards: Vec<Shard>,
    /// Of each tensor: its shard, and its place there.
    names: HashMap<String, (usize, usize)>,
}

/// One file.
#[derive(Debug)]
struct Shard {
    file: Arc<File>,
    name: String,
    /// The file's length when its header was read.
    len: u64,
    /// In the file's order.
    tensors: Vec<Arc<Tensor>>,
    metadata: Vec<(String, String)>,
}

impl Shard {
    fn open(path: &Path) -> Result<Self> {
        let name = path.display().to_string();
        let unread = |error: std::io::Error| unread(&name, 0, &error);
        let metadata = std::fs::metadata(path).map_err(unread)?;
        if !metadata.is_file() {
            // Opening a named pipe would wait.
            return Err(malformed(&name, "it is no regular file"));
        }
        let file = File::open(path).map_err(unread)?;
        let len = file.metadata().map_err(unread)?.len();
        let Header { tensors, metadata } = Header::read(&file, &name)?;
        let tensors = tensors.into_iter().map(Arc::new).collect();
        Ok(Self { file: Arc::new(file), name, len, tensors, metadata })
    }
}

impl Checkpoint {
    /// Opens a `.safetensors` file, an index (`model.safetensors.index.json`) with the files that it names, or a folder:
    /// the index in it, or else all of its `.safetensors` files.
    ///
    /// # Errors
    /// [`Error::Read`] with what the system says; [`Error::Malformed`] for what is not what it says it is.
    pub fn open(path: impl AsRef<Path>) -> Result<Self> {
        let path = path.as_ref();
        let found = index::find(path)?;
        let Some(index) = found.index else { return Self::open_files(&found.files) };
        let mut checkpoint = Self::open_shards(&found.files)?;
        // The index says which tensors there are.
        for (shard, file) in checkpoint.shards.iter_mut().zip(&found.files) {
            let wanted = index.of(file);
            shard.tensors.retain(|tensor| wanted.contains(tensor.name()));
            let have: std::collections::HashSet<&str> = shard.tensors.iter().map(|t| t.name()).collect();
            if let Some(missing) = wanted.iter().find(|name| !have.contains(name.as_str())) {
                return Err(Error::Malformed {
                    what: path.display().to_string(),
                    tensor: Some(missing.as_str().into()),
                    why: format!("is said to be in {}, which does not have it; get both again", shard.name),
                });
            }
        }
        checkpoint.name_all()?;
        Ok(checkpoint)
    }

    /// Opens several files that belong together, with no index: all tensors of all of them.
    ///
    /// # Errors
    /// As for [`open`](Self::open), and [`Error::Malformed`] for a tensor that two of them have; [`Error::Empty`] without
    /// files.
    pub fn open_files<P: AsRef<Path>>(paths: &[P]) -> Result<Self> {
        let mut checkpoint = Self::open_shards(paths)?;
        checkpoint.name_all()?;
        Ok(checkpoint)
    }

    fn open_shards<P: AsRef<Path>>(paths: &[P]) -> Result<Self> {
        if paths.is_empty() {
            return Err(Error::Empty);
        }
        let shards = paths.iter().map(|path| Shard::open(path.as_ref())).collect::<Result<Vec<_>>>()?;
        Ok(Self { shards, names: HashMap::new() })
    }

    fn name_all(&mut self) -> Result<()> {
        for (s, shard) in self.shards.iter().enumerate() {
            for (t, tensor) in shard.tensors.iter().enumerate() {
                if let Some((other, _)) = self.names.insert(tensor.name().to_owned(), (s, t)) {
                    return Err(Error::Malformed {
                        what: shard.name.clone(),
                        tensor: Some(tensor.name().into()),
                        why: format!("is in {} too; load them one by one", self.shards[other].name),
                    });
                }
            }
        }
        Ok(())
    }

    /// What there is, shard by shard, in the order in which it lies in the files.
    pub fn tensors(&self) -> impl Iterator<Item = &Tensor> {
        self.shards.iter().flat_map(|shard| shard.tensors.iter().map(|tensor| &**tensor))
    }

    /// The tensor of that name.
    #[must_use]
    pub fn get(&self, name: &str) -> Option<&Tensor> {
        self.place(name).map(|(shard, tensor)| &*shard.tensors[tensor])
    }

    fn place(&self, name: &str) -> Option<(&Shard, usize)> {
        self.names.get(name).map(|&(shard, tensor)| (&self.shards[shard], tensor))
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

    /// Bytes of all tensors.
    #[must_use]
    pub fn bytes(&self) -> u64 {
        self.tensors().map(Tensor::len).sum()
    }

    /// What the headers say beside tensors (`__metadata__`), shard by shard: text that nobody has checked.
    pub fn metadata(&self) -> impl Iterator<Item = (&str, &str)> {
        let pairs = self.shards.iter().flat_map(|shard| &shard.metadata);
        pairs.map(|(key, value)| (key.as_str(), value.as_str()))
    }

    /// The files, as they were named or found.
    pub fn files(&self) -> impl Iterator<Item = &Path> {
        self.shards.iter().map(|shard| Path::new(&shard.name))
    }

    /// Starts setting up a load through a pipeline. All tensors, unless told.
    pub fn loader<'a>(&'a self, pipeline: &'a Pipeline) -> Loader<'a> {
        Loader::new(self, pipeline)
    }

    /// Loads one tensor, into memory of its own, and waits for it. `None`: there is none of that name.
    ///
    /// # Errors
    /// As for [`Loading`].
    pub fn tensor(&self, pipeline: &Pipeline, name: &str) -> Result<Option<DeviceTensor>> {
        let Some((shard, place)) = self.place(name) else { return Ok(None) };
        let one = std::slice::from_ref(&shard.tensors[place]);
        self.loader(pipeline)
            .start_with(|s| if std::ptr::eq(s, shard) { one.to_vec() } else { Vec::new() })?
            .next()
            .transpose()
    }

    /// The XXH3 (128 bits) of a tensor's bytes as they are in the file now, read on the caller's thread. `None`: there is
    /// none of that name.
    ///
    /// # Errors
    /// [`Error::Read`]; [`Error::Shrunk`] for a file that has become shorter.
    pub fn file_checksum(&self, name: &str) -> Result<Option<u128>> {
        let Some((shard, place)) = self.place(name) else { return Ok(None) };
        let range = shard.tensors[place].range();
        let mut hasher = Hasher::default();
        let mut block = vec![0; (range.end - range.start).min(BLOCK as u64) as usize];
        let mut at = range.start;
        while at < range.end {
            let part = (range.end - at).min(BLOCK as u64) as usize;
            shard.file.read_exact_at(&mut block[..part], at).map_err(|error| match error.kind() {
                std::io::ErrorKind::UnexpectedEof => {
                    let end = shard.file.metadata().map_or(at, |m| m.len());
                    Error::Shrunk { what: shard.name.clone(), end, len: shard.len }
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

/// Files, and an index of them if there is one.
struct Found {
    files: Vec<PathBuf>,
    index: Option<index::Index>,
}
