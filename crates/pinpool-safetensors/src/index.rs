//! Which files make up a checkpoint: one, those of an index, or those of a folder.
//!
//! An index is JSON whose `weight_map` names the file of each tensor. It comes from outside, so only files right beside
//! the index are opened. [`Map::look`] finds the map and checks all of the text; [`Index::parse`] reads the map again
//! and notes eight bytes of each tensor: half of the hash of its name, and where the name is in the text. The notes are
//! sorted by hash and name, which finds a tensor that is named twice, and later the file of a tensor. The text is kept
//! while the files are opened.
//!
//! A folder's index is the one file in it that is named like one ([`is_index`]). A folder without an index must have all
//! files of each numbered set (`model-00002-of-00003`).

use std::borrow::Cow;
use std::cmp::Ordering;
use std::collections::{BTreeMap, BTreeSet, HashSet};
use std::fs;
use std::io::{ErrorKind, Read};
use std::path::{Component, Path, PathBuf};

use xxhash_rust::xxh3::xxh3_64;

use super::header::{LONGEST_NAME, Unescaped};
use super::json::{Json, JsonFault, JsonKind, Text};
use super::{FoundFiles, blamed, malformed, open_regular, reserved, stand_in, unread};
use crate::escape::{NAME, Shown};
use pinpool::{Error, Result};

/// The longest index that is read: as long as a header may be.
const LONGEST_INDEX: u64 = 100_000_000;
const SUFFIX: &str = "safetensors";
/// The longest name that a file can have (Linux's `NAME_MAX`), in bytes.
const LONGEST_FILE: usize = 255;
/// The most files that an index may name.
const FILES: usize = 10_000;
/// The index's entry that says which tensor is in which file.
const MAP: &str = "weight_map";
/// What some editors put before a text.
const BYTE_ORDER_MARK: &[u8] = "\u{feff}".as_bytes();

/// An index: which tensor is in which file.
pub(super) struct Index {
    /// Where its files are.
    folder: PathBuf,
    text: String,
    /// For each tensor: half of the hash of its name (upper 32 bits), and where the name starts in the text (lower 32
    /// bits). Sorted by that half, and then by the names.
    tensors: Vec<u64>,
    /// Sorted.
    files: Vec<String>,
}

impl Index {
    /// The names of its files, sorted.
    pub(super) fn files(&self) -> &[String] {
        &self.files
    }

    pub(super) fn path(&self, file: &str) -> PathBuf {
        self.folder.join(file)
    }

    /// The number of tensors that it names.
    pub(super) fn len(&self) -> usize {
        self.tensors.len()
    }

    /// Whether it says that this tensor is in this file.
    pub(super) fn says(&self, tensor: &str, file: &str) -> bool {
        let wanted = half(tensor);
        let found = self.tensors.binary_search_by(|&noted| {
            let before = ((noted >> 32) as u32).cmp(&wanted);
            before.then_with(|| pair(&self.text, noted).0.get().as_ref().cmp(tensor))
        });
        found.is_ok_and(|place| pair(&self.text, self.tensors[place]).1.is(file))
    }

    /// The first tensor, and its file, for which `is` is false.
    pub(super) fn first_not(&self, mut is: impl FnMut(&str, &str) -> bool) -> Option<(Text<'_>, Text<'_>)> {
        let pairs = self.tensors.iter().map(|noted| pair(&self.text, *noted));
        let mut missing = pairs.filter(|(tensor, file)| !is(&tensor.get(), &file.get()));
        missing.next()
    }

    /// The error for a file that could not be opened, with the number of those that are missing if it is. `path` is the
    /// index's, or that of its folder.
    pub(super) fn incomplete(&self, path: &Path, error: Error) -> Error {
        let Error::Read { what, offset, kind: kind @ ErrorKind::NotFound, text } = error else {
            return error;
        };
        let is_missing = |error: std::io::Error| error.kind() == ErrorKind::NotFound;
        let paths = self.files.iter().map(|file| self.path(file));
        let missing = paths.filter(|file| fs::metadata(file).is_err_and(is_missing)).count();
        let (all, path) = (self.files.len(), path.display());
        let text = format!(
            "{text}; {missing} of the {all} files that the index of {path} names are missing: the download is incomplete, \
             get the rest"
        );
        Error::Read { what, offset, kind, text }
    }

    fn read(path: &Path) -> Result<Self> {
        let what = path.display().to_string();
        let (file, metadata) = open_regular(path, &what)?;
        let mut text = Vec::new();
        // One byte more than the length is read, to notice a file that grows.
        let len = metadata.len().min(LONGEST_INDEX) as usize;
        reserved(text.try_reserve_exact(len + 1), &what, len)?;
        file.take(len as u64 + 1).read_to_end(&mut text).map_err(|error| unread(&what, 0, &error))?;
        if text.len() as u64 > LONGEST_INDEX {
            let why = format!("more than {LONGEST_INDEX} bytes are too many for an index");
            return Err(malformed(&what, why));
        }
        if text.len() > len {
            return Err(malformed(
                &what,
                "it grew while it was read; open it again while no process writes to it",
            ));
        }
        if text.starts_with(BYTE_ORDER_MARK) {
            text.drain(..BYTE_ORDER_MARK.len());
        }
        if let Some(why) = stand_in(&text).filter(|_| !text.trim_ascii_start().starts_with(b"{")) {
            return Err(malformed(&what, why));
        }
        let text = String::from_utf8(text).map_err(|error| no_json(&what, &error.utf8_error()))?;
        Self::parse(&what, text, path.parent().unwrap_or_else(|| Path::new("")))
    }

    /// Reads the text of an index. `what` is its name for errors; its files are in `folder`.
    fn parse(what: &str, text: String, folder: &Path) -> Result<Self> {
        let Map { at: Some(map), count, .. } = Map::look(what, &text)? else { return Err(no_map(what)) };
        if count == 0 {
            return Err(malformed(what, "its \"weight_map\" names no tensor"));
        }
        let mut tensors = Vec::new();
        reserved(tensors.try_reserve_exact(count), what, count * size_of::<u64>())?;
        let mut files: HashSet<Cow<'_, str>> = HashSet::new();
        let (mut wrong, mut before) = (None, None);
        // No error is possible: `look` has read this object.
        let _ = Json::at(&text, map).object(|json, tensor| {
            tensors.push(u64::from(half(&tensor.get())) << 32 | tensor.at as u64);
            let file = json.string()?;
            // Most tensors are in the file of the tensor before, whose name was checked.
            if wrong.is_some() || before == Some(file.raw) {
                return Ok(());
            }
            before = Some(file.raw);
            if !is_beside(file) {
                let file = Unescaped(file);
                let file = Shown(&file, NAME);
                let why = format!("is said to be in \"{file}\", which is no name of a file beside the index");
                wrong = Some(blamed(what, &Unescaped(tensor), why));
            } else if files.insert(file.get()) && files.len() > FILES {
                wrong = Some(malformed(what, format!("it names more than {FILES} files; join some of them")));
            }
            Ok(())
        });
        if let Some(wrong) = wrong {
            return Err(wrong);
        }
        let name = |noted: &u64| pair(&text, *noted).0;
        let order = |a: &u64, b: &u64| (a >> 32).cmp(&(b >> 32)).then_with(|| name(a).compare(name(b)));
        tensors.sort_unstable_by(order);
        if let Some(pair) = tensors.windows(2).find(|pair| order(&pair[0], &pair[1]) == Ordering::Equal) {
            let why = "is there twice, and it is unknown in which file it is; get the index again";
            return Err(blamed(what, &Unescaped(name(&pair[0])), why));
        }
        let mut files: Vec<String> = files.into_iter().map(Cow::into_owned).collect();
        files.sort_unstable();
        Ok(Self { folder: folder.to_owned(), text, tensors, files })
    }
}

/// Half of a name's hash.
fn half(name: &str) -> u32 {
    (xxh3_64(name.as_bytes()) >> 32) as u32
}

/// The name of a noted tensor, and that of its file.
fn pair(text: &str, noted: u64) -> (Text<'_>, Text<'_>) {
    let mut json = Json::at(text, (noted as u32 as usize).saturating_sub(1));
    // No error is possible: both strings were read before.
    let name = json.string();
    let file = name.and_then(|name| Ok((name, json.colon_string()?)));
    file.unwrap_or([Text::checked("", 0, 0, true); 2].into())
}

/// Whether this is the name of a file beside the index, and no path that leads elsewhere.
fn is_beside(file: Text<'_>) -> bool {
    // Checked before it is unescaped: an escape has at most six bytes for one.
    if file.raw.len() > 6 * LONGEST_FILE {
        return false;
    }
    let file = file.get();
    let name = file.strip_prefix("./").unwrap_or(&file);
    let mut parts = Path::new(name).components();
    let is_name = matches!((parts.next(), parts.next()), (Some(Component::Normal(_)), None));
    is_name && file.len() <= LONGEST_FILE
}

fn no_map(what: &str) -> Error {
    malformed(what, "it has no object \"weight_map\", which says which tensor is in which file")
}

fn no_json(what: &str, said: &dyn std::fmt::Display) -> Error {
    malformed(what, format!("it is no JSON ({}); get it again", Shown(said, 2 * NAME)))
}

/// What the first pass over an index finds of the map.
#[derive(Default)]
struct Map<'a> {
    /// Where the map starts in the text. `None`: there is none.
    at: Option<usize>,
    /// The number of tensors in it.
    count: usize,
    /// While the file of a tensor is being read: the tensor.
    tensor: Option<Text<'a>>,
}

impl<'a> Map<'a> {
    fn look(what: &str, text: &'a str) -> Result<Self> {
        let (mut map, mut twice) = (Self::default(), false);
        let mut json = Json::at(text, 0);
        let result = json.object(|json, key| {
            if !key.is(MAP) {
                return json.skip();
            }
            if map.at.is_some() {
                twice = true;
                return Err(json.fault("this is there twice"));
            }
            let start = json.place();
            json.object(|json, tensor| {
                map.tensor = Some(tensor);
                if tensor.raw.len() > LONGEST_NAME {
                    return Err(json.fault("its name is longer than 65,535 bytes"));
                }
                json.string()?;
                map.tensor = None;
                map.count += 1;
                Ok(())
            })?;
            map.at = Some(start);
            Ok(())
        });
        match result.and_then(|()| json.end()) {
            Ok(()) => Ok(map),
            Err(fault) => Err(map.blame(what, &fault, twice)),
        }
    }

    /// The error for a fault in the text.
    fn blame(&self, what: &str, fault: &JsonFault<'_>, twice: bool) -> Error {
        match self.tensor {
            _ if fault.kind() != JsonKind::Other => no_json(what, fault),
            Some(tensor) => {
                let why = format!("is said to be in what is no name of a file beside the index ({fault})");
                blamed(what, &Unescaped(tensor), why)
            }
            None if twice => {
                let twice = "is there twice, and it is unknown which of the two is meant; get the file again";
                malformed(what, format!("its {MAP:?} {twice}"))
            }
            None => no_map(what),
        }
    }
}

/// Finds the files that a path stands for.
pub(super) fn find(path: &Path) -> Result<FoundFiles> {
    if path.is_dir() {
        return of_folder(path);
    }
    match path.extension().is_some_and(|end| end.eq_ignore_ascii_case("json")) {
        true => of_index(path),
        false => Ok(FoundFiles::Files(vec![path.to_owned()])),
    }
}

fn of_index(path: &Path) -> Result<FoundFiles> {
    Ok(FoundFiles::Index(Index::read(path)?))
}

/// Whether a file in a folder is its index, by the name: `model.safetensors.index.json`, and with a variant
/// `model.safetensors.index.fp16.json` or `model.safetensors.fp16.index.json`.
fn is_index(file: &Path) -> bool {
    let name = file.file_name().and_then(|name| name.to_str()).unwrap_or_default();
    let end = name.split_once(".safetensors.").and_then(|(_, end)| end.strip_suffix(".json"));
    // macOS leaves a hidden file `._NAME` beside each file that it copies.
    !name.starts_with('.') && end.is_some_and(|end| end.split('.').any(|part| part == "index"))
}

fn of_folder(path: &Path) -> Result<FoundFiles> {
    let what = path.display().to_string();
    let entries = fs::read_dir(path).map_err(|error| unread(&what, 0, &error))?;
    let (mut files, mut indexes) = (Vec::new(), Vec::new());
    for entry in entries {
        let file = entry.map_err(|error| unread(&what, 0, &error))?.path();
        // A broken link counts as what its name says, and opening it then says what is missing. Without the index, more
        // would be loaded than it names.
        if is_index(&file) {
            indexes.push(file);
        } else if file.extension().is_some_and(|end| end == SUFFIX) && !file.is_dir() {
            files.push(file);
        }
    }
    match &indexes[..] {
        [] => {}
        [index] => return of_index(index),
        _ => {
            indexes.sort();
            let names: Vec<_> = indexes
                .iter()
                .filter_map(|index| index.file_name())
                .map(|name| name.to_string_lossy())
                .collect();
            let names = names.join(", ");
            let names = Shown(&names, 2 * NAME);
            return Err(malformed(
                &what,
                format!("it has several indexes ({names}); give the path of the one to load"),
            ));
        }
    }
    if files.is_empty() {
        let why = format!(
            "there is neither an index (*.{SUFFIX}.index.json) nor a file that ends in .{SUFFIX} in it"
        );
        return Err(malformed(&what, why));
    }
    files.sort();
    complete(&what, &files)?;
    Ok(FoundFiles::Files(files))
}

/// An error if a file of a numbered set (`model-00002-of-00003`) is missing.
fn complete(what: &str, files: &[PathBuf]) -> Result<()> {
    // For each set, by what its names start with and how many files it has: the numbers that are there.
    let mut sets: BTreeMap<(&str, &str), BTreeSet<u64>> = BTreeMap::new();
    for file in files {
        let stem = file.file_stem().and_then(|stem| stem.to_str()).unwrap_or_default();
        let Some((front, of)) = stem.rsplit_once("-of-") else { continue };
        let Some((set, number)) = front.rsplit_once('-') else { continue };
        if let (Ok(_), Ok(number)) = (of.parse::<u64>(), number.parse()) {
            sets.entry((set, of)).or_default().insert(number);
        }
    }
    for ((set, of), there) in sets {
        let count: u64 = of.parse().unwrap_or_default();
        // Most sets count from one.
        let from = u64::from(!there.contains(&0));
        if let Some(missing) = (from..count.saturating_add(from)).find(|number| !there.contains(number)) {
            let (width, have) = (of.len(), there.range(from..count.saturating_add(from)).count() as u64);
            let why = format!(
                "{set}-{missing:0width$}-of-{of}.{SUFFIX} is missing in it ({} of the {count} files of its set are): \
                 the download is incomplete, get the rest",
                count - have
            );
            return Err(malformed(what, why));
        }
    }
    Ok(())
}
