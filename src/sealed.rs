//! What keeps sealed traits sealed.
//!
//! A trait that generic code of the crate works with is public, and so are the methods of the traits that it stands on: with
//! a bound on it, code outside can call them, hidden or not. So each of these methods takes a [`Key`], which only the crate
//! can name or make. (It has no `Default` and comes out of no public function, so inference does not help either.)

/// The crate's own word that it is the crate that calls.
#[derive(Clone, Copy, Debug)]
pub struct Key(());

/// The one value.
pub(crate) const KEY: Key = Key(());
