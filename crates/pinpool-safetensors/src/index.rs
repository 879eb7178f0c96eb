//! Which files make up a checkpoint: one, those of an index, or those of a folder.
//!
//! An index is JSON whose `weight_map` names the file of each tensor. It comes from outside, so
//! only files beside it are opened. [`Index::read`] collects their names. [`Index::choose`] reads
//! the text again when they are open.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::ops::Range;
use std::path::{Path, PathBuf};

use super::header::{LONGEST_HEADER, Names, Table};
use super::json::{entries, named, string};
use super::{beginning, blamed, malformed, open_regular, read_at, unread};
use pinpool::Result;

/// The longest name that a file can have (Linux's `NAME_MAX`), in bytes.
const LONGEST_FILE: usize = 255;
/// The most files that an index may name.
const FILES: usize = 10_000;

/// An index: which tensor is in which file.
pub(super) struct Index {
    /// Its name for errors.
    what: String,
    text: String,
    /// Where its map is in the text.
    map: Range<usize>,
    /// The names of its files, sorted.
    files: Vec<String>,
}

impl Index {
    /// Marks those of the tensors of its files, which were opened in order, that it names.
    pub(super) fn choose(&self, tables: &mut [Table], names: &Names) -> Result<()> {
        let (what, mut number) = (&*self.what, 0);
        tables.iter_mut().flat_map(|table| &mut table.entries).for_each(|entry| entry.listed = false);
        each_pair(what, &self.text[self.map.clone()], |tensor, file| {
            if let Some(file) = file {
                number = self.files.binary_search_by(|name| (**name).cmp(file)).unwrap_or_default();
            }
            let (name, mut found, mut again) = (named(tensor), None, false);
            for (shard, tensor) in names.get(&name, |(shard, tensor)| tables[shard as usize].name(tensor)) {
                again |= tables[shard as usize].entries[tensor as usize].listed;
                found = found.or((shard as usize == number).then_some(tensor));
            }
            let file = &mut tables[number];
            let why = match found {
                Some(_) if again => "is named twice; get the index again".into(),
                Some(tensor) => {
                    file.entries[tensor as usize].listed = true;
                    return Ok(());
                }
                None => format!("is said to be in {}, which does not have it; get both again", file.what()),
            };
            Err(blamed(what, &name, why))
        })
    }

    fn read(path: &Path) -> Result<(Vec<PathBuf>, Option<Index>)> {
        let what = path.display().to_string();
        let (file, metadata) = open_regular(path)?;
        if metadata.len() > LONGEST_HEADER {
            let why = format!("more than {LONGEST_HEADER} bytes are too many for an index");
            return Err(malformed(&what, why));
        }
        let text = String::from_utf8(read_at(&file, path, 0, metadata.len().max(1) as usize)?)
            .map_err(|e| malformed(&what, format!("it is no text ({}); get it again", e.utf8_error())))?;
        let no_map = |said: &dyn std::fmt::Display| {
            let begins = beginning(text.as_bytes());
            let text = format!("it is no JSON object with a \"weight_map\" ({said}) and {begins}");
            malformed(&what, text + "; get it again")
        };
        let mut map = None;
        entries(&text, no_map, |key, value| match key == "\"weight_map\"" && map.replace(value).is_some() {
            true => Err(no_map(&"it is there twice")),
            false => Ok(()),
        })?;
        let map = map.ok_or_else(|| no_map(&"it is not there"))?;
        let start = map.as_ptr() as usize - text.as_ptr() as usize;
        let (map, mut files) = (start..start + map.len(), BTreeSet::new());
        each_pair(&what, &text[map.clone()], |_, file| {
            if let Some(file) = file.filter(|file| !files.contains(*file)) {
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
        Ok((paths, Some(Self { files: files.into_iter().collect(), what, text, map })))
    }
}

/// Calls `take` with each tensor of an index's map, as it stands in the text, and its file's name,
/// if it is not that of the tensor before.
fn each_pair(what: &str, map: &str, mut take: impl FnMut(&str, Option<&str>) -> Result<()>) -> Result<()> {
    let mut last = "";
    let told = |said: &dyn std::fmt::Display| malformed(what, format!("its \"weight_map\": {said}"));
    entries(map, told, |tensor, file| {
        if file == last {
            return take(tensor, None);
        }
        last = file;
        // A path would lead elsewhere.
        let is_name = |name: &str| !name.contains('/') && !matches!(name, "" | "." | "..");
        match string(file) {
            Ok(file) if is_name(&file) && file.len() <= LONGEST_FILE => take(tensor, Some(&file)),
            _ => {
                let why = format!("is said to be in {file:.200}, no name of a file beside the index");
                Err(blamed(what, &named(tensor), why))
            }
        }
    })
}

/// Finds the files that a path stands for.
pub(super) fn find(path: &Path) -> Result<(Vec<PathBuf>, Option<Index>)> {
    if path.is_dir() {
        return of_folder(path);
    }
    match path.extension().is_some_and(|end| end.eq_ignore_ascii_case("json")) {
        true => Index::read(path),
        false => Ok((vec![path.to_owned()], None)),
    }
}

/// Whether a file in a folder is its index, by the name: `model.safetensors.index.json`, and with a
/// variant `model.safetensors.index.fp16.json` or `model.safetensors.fp16.index.json`.
fn is_index(file: &Path) -> bool {
    let name = file.file_name().and_then(|name| name.to_str()).unwrap_or_default();
    let end = name.split_once(".safetensors.").and_then(|(_, end)| end.strip_suffix(".json"));
    // macOS leaves a hidden file `._NAME` beside each file that it copies.
    !name.starts_with('.') && end.is_some_and(|end| end.split('.').any(|part| part == "index"))
}

fn of_folder(path: &Path) -> Result<(Vec<PathBuf>, Option<Index>)> {
    let what = path.display().to_string();
    let entries = fs::read_dir(path).map_err(|error| unread(path, 0, &error))?;
    let (mut files, mut indexes) = (Vec::new(), Vec::new());
    for entry in entries {
        let file = entry.map_err(|error| unread(path, 0, &error))?.path();
        // A broken link counts as what its name says, and opening it tells what is missing. Without
        // the index, more would be loaded than it names.
        if is_index(&file) {
            indexes.push(file);
        } else if file.extension().is_some_and(|end| end == "safetensors") && !file.is_dir() {
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
        let why = "neither an index (*.safetensors.index.json) nor a file that ends in .safetensors is in it";
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
    if let Some(((set, of), there)) = short {
        let lacks = "the download is incomplete, get the rest";
        return Err(malformed(
            &what,
            format!("{there} files {set}-*-of-{of}.safetensors are in it: {lacks}"),
        ));
    }
    Ok((files, None))
}
