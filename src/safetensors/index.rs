//! Which files make up a checkpoint: one, those of an index, or those of a folder.
//!
//! An index is JSON whose `weight_map` names the file of each tensor. The names are a stranger's: only files right beside
//! the index are opened.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Component, Path, PathBuf};

use serde_json::Value;

use super::{Found, malformed, unread};
use crate::error::{Error, Result};

/// The longest index that is read: as long as a header may be.
const LONGEST: u64 = 100_000_000;
const SUFFIX: &str = "safetensors";
const INDEX: &str = "model.safetensors.index.json";

/// What is in which file, by the index.
pub(super) struct Index {
    files: BTreeMap<PathBuf, BTreeSet<String>>,
}

impl Index {
    /// The names of what is said to be in a file.
    pub(super) fn of(&self, file: &Path) -> &BTreeSet<String> {
        static NONE: BTreeSet<String> = BTreeSet::new();
        self.files.get(file).unwrap_or(&NONE)
    }

    fn read(path: &Path) -> Result<Self> {
        let what = path.display().to_string();
        let failed = |error: std::io::Error| unread(&what, 0, &error);
        let len = std::fs::metadata(path).map_err(failed)?.len();
        if len > LONGEST {
            return Err(malformed(
                &what,
                format!("{len} bytes are too many for an index, which has at most {LONGEST}"),
            ));
        }
        let text = std::fs::read(path).map_err(failed)?;
        Self::parse(&what, &text, path.parent().unwrap_or_else(|| Path::new("")))
    }

    /// `folder` is where its files are.
    fn parse(what: &str, text: &[u8], folder: &Path) -> Result<Self> {
        let value: Value = serde_json::from_slice(text)
            .map_err(|error| malformed(what, format!("it is no JSON ({error}); get it again")))?;
        let Some(map) = value.get("weight_map").and_then(Value::as_object) else {
            return Err(malformed(
                what,
                "it has no object \"weight_map\", which says which tensor is in which file",
            ));
        };
        let mut files: BTreeMap<PathBuf, BTreeSet<String>> = BTreeMap::new();
        for (tensor, file) in map {
            let plain = file.as_str().filter(|name| {
                let mut parts = Path::new(name).components();
                matches!((parts.next(), parts.next()), (Some(Component::Normal(_)), None))
            });
            let Some(file) = plain else {
                let why = format!("is said to be in {file}, which is no name of a file beside the index");
                return Err(Error::Malformed {
                    what: what.into(),
                    tensor: Some(tensor.as_str().into()),
                    why,
                });
            };
            files.entry(folder.join(file)).or_default().insert(tensor.clone());
        }
        if files.is_empty() {
            return Err(malformed(what, "its \"weight_map\" names no tensor"));
        }
        Ok(Self { files })
    }
}

/// Finds the files that a path stands for.
pub(super) fn find(path: &Path) -> Result<Found> {
    if path.is_dir() {
        let index = path.join(INDEX);
        return if index.is_file() { of_index(&index) } else { of_folder(path) };
    }
    match path.extension().is_some_and(|end| end.eq_ignore_ascii_case("json")) {
        true => of_index(path),
        false => Ok(Found { files: vec![path.to_owned()], index: None }),
    }
}

fn of_index(path: &Path) -> Result<Found> {
    let index = Index::read(path)?;
    Ok(Found { files: index.files.keys().cloned().collect(), index: Some(index) })
}

fn of_folder(path: &Path) -> Result<Found> {
    let what = path.display().to_string();
    let entries = std::fs::read_dir(path).map_err(|error| unread(&what, 0, &error))?;
    let mut files = Vec::new();
    for entry in entries {
        let file = entry.map_err(|error| unread(&what, 0, &error))?.path();
        if file.extension().is_some_and(|end| end == SUFFIX) && file.is_file() {
            files.push(file);
        }
    }
    if files.is_empty() {
        return Err(malformed(
            &what,
            format!("there is neither {INDEX} nor a file that ends in .{SUFFIX} in it"),
        ));
    }
    files.sort();
    Ok(Found { files, index: None })
}
