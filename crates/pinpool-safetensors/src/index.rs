//! Which files make up a checkpoint: one, those of an index, or those of a folder.
//!
//! An index is JSON whose `weight_map` names the file of each tensor. It comes from outside, so only files
//! right beside the index are opened. [`Index::read`] collects their names. [`Index::choose`] reads the text
//! again when they are open.
//!
//! A folder's index is the one file in it that is named like one ([`is_index`]). A folder without an index
//! must have all files of each numbered set (`model-00002-of-00003`).

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::{Path, PathBuf};

use super::header::{LONGEST_HEADER, Names, Table};
use super::json::{entries, named, string};
use super::{beginning, blamed, malformed, open_regular, read_at, unread};
use pinpool::Result;

const SUFFIX: &str = "safetensors";
/// The longest name that a file can have (Linux's `NAME_MAX`), in bytes.
const LONGEST_FILE: usize = 255;
/// The most files that an index may name.
const FILES: usize = 10_000;

/// An index: which tensor is in which file.
pub(super) struct Index {
    /// Its name for errors.
    what: String,
    text: String,
    /// The names of its files, sorted.
    files: Vec<String>,
}

/// The files that a path stands for, and the index that names them.
type Found = (Vec<PathBuf>, Option<Index>);

impl Index {
    /// Marks those of the tensors of its files, which were opened in order, that it names.
    pub(super) fn choose(&self, tables: &mut [Table], names: &Names) -> Result<()> {
        let what = &*self.what;
        tables.iter_mut().flat_map(|table| &mut table.entries).for_each(|entry| entry.listed = false);
        each_pair(what, &self.text, |tensor, file| {
            let number = self.files.binary_search_by(|name| (**name).cmp(file)).unwrap_or_default();
            let name = named(tensor);
            let place = names
                .get(&name, |(shard, tensor)| tables[shard as usize].name(tensor))
                .find(|(shard, _)| *shard as usize == number);
            let Some((_, place)) = place else {
                let file = tables[number].what();
                let why = format!("is said to be in {file}, which does not have it; get both again");
                return Err(blamed(what, &name, why));
            };
            match std::mem::replace(&mut tables[number].entries[place as usize].listed, true) {
                true => Err(blamed(what, &name, "is named twice; get the index again")),
                false => Ok(()),
            }
        })
    }

    fn read(path: &Path) -> Result<Found> {
        let what = path.display().to_string();
        let (file, metadata) = open_regular(path)?;
        if metadata.len() > LONGEST_HEADER {
            let why = format!("more than {LONGEST_HEADER} bytes are too many for an index");
            return Err(malformed(&what, why));
        }
        let text =
            String::from_utf8(read_at(&file, path, 0, metadata.len().max(1) as usize)?).map_err(|error| {
                malformed(&what, format!("it is no text ({}); get it again", error.utf8_error()))
            })?;
        let mut files = BTreeSet::new();
        each_pair(&what, &text, |_, file| {
            if !files.contains(file) {
                files.insert(file.to_owned());
            }
            if files.len() > FILES {
                return Err(malformed(&what, format!("it names more than {FILES} files; join some of them")));
            }
            Ok(())
        })?;
        if files.is_empty() {
            return Err(malformed(&what, "its \"weight_map\" names no tensor"));
        }
        let paths = files.iter().map(|file| path.with_file_name(file)).collect();
        Ok((paths, Some(Self { files: files.into_iter().collect(), what, text })))
    }
}

/// Calls `take` with each tensor of an index, as it stands in the text, and the name of its file.
fn each_pair(what: &str, text: &str, mut take: impl FnMut(&str, &str) -> Result<()>) -> Result<()> {
    let no_map = |said: &dyn std::fmt::Display| {
        let begins = beginning(text.as_bytes());
        let why =
            format!("it is no JSON object with an object \"weight_map\" ({said}) and {begins}; get it again");
        malformed(what, why)
    };
    let mut is_there = false;
    entries(text, no_map, |key, map| {
        if key != "\"weight_map\"" {
            return Ok(());
        }
        if std::mem::replace(&mut is_there, true) {
            return Err(no_map(&"it is there twice"));
        }
        entries(map, no_map, |tensor, file| {
            // A path would lead elsewhere.
            let is_name = |name: &str| !name.contains('/') && !matches!(name, "" | "." | "..");
            match string(file) {
                Ok(file) if is_name(&file) && file.len() <= LONGEST_FILE => take(tensor, &file),
                _ => {
                    let why =
                        format!("is said to be in {file:.200}, which is no name of a file beside the index");
                    Err(blamed(what, &named(tensor), why))
                }
            }
        })
    })?;
    if is_there { Ok(()) } else { Err(no_map(&"it is not there")) }
}

/// Finds the files that a path stands for.
pub(super) fn find(path: &Path) -> Result<Found> {
    if path.is_dir() {
        return of_folder(path);
    }
    match path.extension().is_some_and(|end| end.eq_ignore_ascii_case("json")) {
        true => Index::read(path),
        false => Ok((vec![path.to_owned()], None)),
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

fn of_folder(path: &Path) -> Result<Found> {
    let what = path.display().to_string();
    let entries = fs::read_dir(path).map_err(|error| unread(path, 0, &error))?;
    let (mut files, mut indexes) = (Vec::new(), Vec::new());
    for entry in entries {
        let file = entry.map_err(|error| unread(path, 0, &error))?.path();
        // A broken link counts as what its name says, and opening it then says what is missing. Without the
        // index, more would be loaded than it names.
        if is_index(&file) {
            indexes.push(file);
        } else if file.extension().is_some_and(|end| end == SUFFIX) && !file.is_dir() {
            files.push(file);
        }
    }
    indexes.sort();
    if let [first, second, ..] = &*indexes {
        let names = format!("{} and {}", first.display(), second.display());
        let why = format!("it has several indexes ({names} among them); give the path of the one to load");
        return Err(malformed(&what, why));
    }
    if let Some(index) = indexes.pop() {
        return Index::read(&index);
    }
    if files.is_empty() {
        let why = format!(
            "there is neither an index (*.{SUFFIX}.index.json) nor a file that ends in .{SUFFIX} in it"
        );
        return Err(malformed(&what, why));
    }
    files.sort();
    // How many files of each numbered set (`model-00002-of-00003`) are there.
    let mut sets = BTreeMap::<(&str, &str), u64>::new();
    for file in &files {
        let stem = file.file_stem().and_then(|stem| stem.to_str()).unwrap_or_default();
        let parts = stem.rsplit_once("-of-").and_then(|(front, of)| Some((front.rsplit_once('-')?, of)));
        if let Some(((set, _), of)) = parts.filter(|((_, number), _)| number.parse::<u64>().is_ok()) {
            *sets.entry((set, of)).or_default() += 1;
        }
    }
    let short = sets.iter().find(|((_, of), there)| of.parse().is_ok_and(|all: u64| **there < all));
    match short {
        None => Ok((files, None)),
        Some(((set, of), there)) => Err(malformed(
            &what,
            format!(
                "{there} files {set}-*-of-{of}.{SUFFIX} are in it: the download is incomplete, get the rest"
            ),
        )),
    }
}
