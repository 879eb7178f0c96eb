//! Which files make up a checkpoint: one, those of an index, or those of a folder.
//!
//! An index is JSON whose `weight_map` names the file of each tensor. It comes from outside, so only files right beside
//! the index are opened. [`Index::parse`] notes eight bytes of each tensor: the number of its file, and where its name
//! is in the text, which is kept while the files are opened. [`Index::keep`] then leaves of a file's tensors those that
//! the index names, and finds one that is named twice, or that the file does not have.
//!
//! A folder's index is the one file in it that is named like one ([`is_index`]). A folder without an index must have all
//! files of each numbered set (`model-00002-of-00003`).

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::io::{ErrorKind, Read};
use std::path::{Component, Path, PathBuf};

use serde::de::{Error as _, IgnoredAny, MapAccess};

use super::header::{Names, Table, twice};
use super::json::{self, Entries, Key, LONGEST_NAME, Object, Text};
use super::{NAME, blamed, malformed, open_regular, reserved, shown, stand_in, unread};
use pinpool::{Error, Result};

/// The longest index that is read: as long as a header may be.
const LONGEST_INDEX: u64 = 100_000_000;
/// The length of the shortest pair of tensor and file: it bounds how many an index can have.
const SHORTEST_PAIR: usize = r#""":"f","#.len();
const SUFFIX: &str = "safetensors";
/// The longest name that a file can have (Linux's `NAME_MAX`), in bytes.
const LONGEST_FILE: usize = 255;
/// The most files that an index may name.
const FILES: usize = 10_000;
/// The index's entry that says which tensor is in which file.
const MAP: &str = "weight_map";
/// What some editors put before a text.
const BYTE_ORDER_MARK: &[u8] = "\u{feff}".as_bytes();

/// The files that a path stands for.
pub(super) enum FoundFiles {
    Files(Vec<PathBuf>),
    Index(Index),
}

/// An index: which tensor is in which file.
pub(super) struct Index {
    /// Its name for errors.
    what: String,
    /// Where its files are.
    folder: PathBuf,
    text: String,
    /// For each tensor the number of its file, and where its name is in the text. Sorted.
    tensors: Vec<(u32, u32)>,
    /// The names of its files, sorted.
    files: Vec<String>,
}

impl Index {
    /// The paths of its files.
    pub(super) fn paths(&self) -> impl Iterator<Item = PathBuf> {
        self.files.iter().map(|file| self.folder.join(file))
    }

    /// Leaves of the tensors of one of its files those that it names.
    pub(super) fn keep(&self, file: u32, table: &mut Table, names: &Names<u32>) -> Result<()> {
        table.entries.iter_mut().for_each(|entry| entry.listed = false);
        let first = self.tensors.partition_point(|(other, _)| *other < file);
        for (_, place) in self.tensors[first..].iter().take_while(|(other, _)| *other == file) {
            let Some(name) = Text::of(json::first(&self.text[*place as usize..])).map(Text::get) else {
                continue;
            };
            let Some(tensor) = names.get(&name, |tensor| table.name(tensor)) else {
                let path = self.folder.join(&self.files[file as usize]);
                let why =
                    format!("is said to be in {}, which does not have it; get both again", path.display());
                return Err(blamed(&self.what, &name, why));
            };
            if std::mem::replace(&mut table.entries[tensor as usize].listed, true) {
                return Err(twice(&self.what, &name));
            }
        }
        Ok(())
    }

    /// The error for a file that could not be opened, with the number of those that are missing if it is. `path` is the
    /// index's, or that of its folder.
    pub(super) fn incomplete(&self, path: &Path, error: Error) -> Error {
        let Error::Read { what, offset, kind: kind @ ErrorKind::NotFound, text } = error else {
            return error;
        };
        let is_missing = |error: std::io::Error| error.kind() == ErrorKind::NotFound;
        let missing = self.paths().filter(|file| fs::metadata(file).is_err_and(is_missing)).count();
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
        let (mut text, len) = (Vec::new(), metadata.len());
        if len > LONGEST_INDEX {
            let why = format!("more than {LONGEST_INDEX} bytes are too many for an index");
            return Err(malformed(&what, why));
        }
        let most = len as usize + 1;
        reserved(text.try_reserve_exact(most), &what, most)?;
        file.take(len + 1).read_to_end(&mut text).map_err(|error| unread(&what, 0, &error))?;
        if text.len() as u64 > len {
            return Err(malformed(&what, "it has grown while it was read; open it again when it is written"));
        }
        if text.starts_with(BYTE_ORDER_MARK) {
            text.drain(..BYTE_ORDER_MARK.len());
        }
        if let Some(why) = stand_in(&text).filter(|_| !text.trim_ascii_start().starts_with(b"{")) {
            return Err(malformed(&what, why));
        }
        let text = String::from_utf8(text).map_err(|error| no_json(&what, &error.utf8_error()))?;
        Self::parse(what, text, path.parent().unwrap_or_else(|| Path::new("")))
    }

    /// Reads the text of an index. `what` is its name for errors; its files are in `folder`.
    fn parse(what: String, text: String, folder: &Path) -> Result<Self> {
        if json::brackets(&text).is_none() {
            return Err(no_json(&what, &"it is nested too deeply"));
        }
        if !json::is_object(&text) {
            return Err(no_map(&what));
        }
        let most = text.len() / SHORTEST_PAIR + 1;
        let mut map = WeightMap { text: &text, what: &what, ..WeightMap::default() };
        reserved(map.tensors.try_reserve_exact(most), &what, most * size_of::<(u32, u32)>())?;
        let read = json::read(&text, &mut map);
        let WeightMap { mut tensors, files, refused, is_there, .. } = map;
        if let Some(error) = refused {
            return Err(error);
        }
        read.map_err(|said| no_json(&what, &said))?;
        if !is_there {
            return Err(no_map(&what));
        }
        if tensors.is_empty() {
            return Err(malformed(&what, "its \"weight_map\" names no tensor"));
        }
        // Numbered as they come up to here, and then as they are sorted.
        let mut sorted = vec![0; files.len()];
        files.values().zip(0..).for_each(|(number, place)| sorted[*number as usize] = place);
        tensors.iter_mut().for_each(|(file, _)| *file = sorted[*file as usize]);
        tensors.sort_unstable();
        let files = files.into_keys().collect();
        Ok(Self { what, folder: folder.to_owned(), text, tensors, files })
    }
}

/// What is read of an index.
#[derive(Default)]
struct WeightMap<'a> {
    text: &'a str,
    what: &'a str,
    tensors: Vec<(u32, u32)>,
    /// The number of each file, in the order in which they come.
    files: BTreeMap<String, u32>,
    /// Whether the object was found, and whether its entries are being read.
    is_there: bool,
    is_inside: bool,
    /// The file of the tensor before, in which most tensors are, too.
    last: Option<(&'a str, u32)>,
    refused: Option<Error>,
}

impl<'a> Entries<'a> for WeightMap<'a> {
    fn entry<A: MapAccess<'a>>(&mut self, key: Key<'a>, map: &mut A) -> Result<(), A::Error> {
        let Key { name, rest, plain } = key;
        let noted = if self.is_inside {
            let file = json::value(map)?;
            self.note(name, file)
        } else if !name.is(MAP) {
            return map.next_value::<IgnoredAny>().map(drop);
        } else if std::mem::replace(&mut self.is_there, true) {
            let twice = "is there twice, and it is unknown which of the two is meant; get the file again";
            Err(malformed(self.what, format!("its {MAP:?} {twice}")))
        } else if json::is_object(rest) {
            self.is_inside = true;
            map.next_value_seed(Object { text: rest, plain, entries: &mut *self })?;
            self.is_inside = false;
            Ok(())
        } else {
            Err(no_map(self.what))
        };
        noted.map_err(|error| {
            self.refused = Some(error);
            A::Error::custom("")
        })
    }
}

impl<'a> WeightMap<'a> {
    fn note(&mut self, tensor: Text<'a>, file: &'a str) -> Result<()> {
        let number = match self.last {
            // Its name was checked.
            Some((name, number)) if name == file => number,
            _ => self.number(tensor, file)?,
        };
        self.last = Some((file, number));
        // Its quote is before it.
        self.tensors.push((number, json::place(self.text, tensor.raw) - 1));
        Ok(())
    }

    /// The number of a tensor's file, which is a new one where the file was not named before.
    fn number(&mut self, tensor: Text<'_>, file: &str) -> Result<u32> {
        if tensor.raw.len() > LONGEST_NAME {
            return Err(blamed(self.what, &tensor.start(), "has a name longer than 65,535 bytes"));
        }
        // An escape has at most six bytes for one.
        let name = Text::of(file).filter(|name| name.raw.len() <= 6 * LONGEST_FILE).map(Text::get);
        let Some(name) = name.filter(|name| is_beside(name)) else {
            let file = shown(file, NAME);
            let why = format!("is said to be in {file}, which is no name of a file beside the index");
            return Err(blamed(self.what, &tensor.start(), why));
        };
        let count = self.files.len() as u32;
        let number = *self.files.entry(name.into_owned()).or_insert(count);
        match self.files.len() > FILES {
            true => Err(malformed(self.what, format!("it names more than {FILES} files; join some of them"))),
            false => Ok(number),
        }
    }
}

/// Whether this is the name of a file beside the index, and no path that leads elsewhere.
fn is_beside(file: &str) -> bool {
    let name = file.strip_prefix("./").unwrap_or(file);
    let mut parts = Path::new(name).components();
    let is_name = matches!((parts.next(), parts.next()), (Some(Component::Normal(_)), None));
    is_name && file.len() <= LONGEST_FILE
}

fn no_map(what: &str) -> Error {
    malformed(what, "it has no object \"weight_map\", which says which tensor is in which file")
}

fn no_json(what: &str, said: &dyn std::fmt::Display) -> Error {
    malformed(what, format!("it is no JSON ({said}); get it again"))
}

/// Finds the files that a path stands for.
pub(super) fn find(path: &Path) -> Result<FoundFiles> {
    if path.is_dir() {
        return of_folder(path);
    }
    match path.extension().is_some_and(|end| end.eq_ignore_ascii_case("json")) {
        true => Index::read(path).map(FoundFiles::Index),
        false => Ok(FoundFiles::Files(vec![path.to_owned()])),
    }
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
        [index] => return Index::read(index).map(FoundFiles::Index),
        _ => {
            indexes.sort();
            let names: Vec<_> = indexes
                .iter()
                .filter_map(|index| index.file_name())
                .map(|name| name.to_string_lossy())
                .collect();
            let names = shown(&names.join(", "), 2 * NAME);
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
