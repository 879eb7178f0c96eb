//! Which transfers wait for others: those that use the same device memory, one of them writing it, take effect in the
//! order in which they were started.
//!
//! The device memory of the transfers under way is a map of spans that do not overlap. Each span knows the last transfer
//! that writes it, and those that read it since. A transfer that is started looks at the spans of its own ranges alone,
//! waits for what it finds there, and takes their place. So a start costs the same however many transfers there are, and
//! a long row of transfers to one place is a chain in which each waits for the one before it.
//!
//! A transfer that is over lets those behind it go. If it was cancelled while it still waited itself, they wait on, for
//! what it waited for.
//!
//! All of it is under one lock, which is taken under no other and takes none.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::ops::Range;

use crate::locks::Mutex;

/// See the module's page. `J`: a transfer's handle.
#[derive(Debug)]
pub(super) struct Order<J> {
    state: Mutex<OrderState<J>>,
}

#[derive(Debug)]
struct OrderState<J> {
    next: u64,
    nodes: HashMap<u64, Node<J>>,
    /// By first byte.
    spans: BTreeMap<u64, Span>,
}

#[derive(Clone, Debug)]
struct Span {
    end: u64,
    writer: Option<u64>,
    readers: BTreeSet<u64>,
}

#[derive(Debug)]
struct Node<J> {
    /// `None`: a call that is under way, and waited for nothing.
    job: Option<J>,
    ranges: Vec<Range<u64>>,
    /// How many it waits for, and which wait for it.
    waits: usize,
    behind: Vec<u64>,
    over: bool,
}

impl<J: Clone> Order<J> {
    pub(super) fn new() -> Self {
        Self { state: Mutex::new(OrderState { next: 0, nodes: HashMap::new(), spans: BTreeMap::new() }) }
    }

    /// A transfer is about to start that uses these ranges. Its number, which [`over`](Self::over) is called with once,
    /// and whether it may start now. If not, the end of another one gives it.
    pub(super) fn enter(&self, job: J, ranges: Vec<Range<u64>>, writes: bool) -> (u64, bool) {
        let mut state = self.state.lock();
        let number = state.next;
        state.next += 1;
        let mut before = BTreeSet::new();
        for range in &ranges {
            state.take(range, number, writes, &mut before);
        }
        before.remove(&number);
        for other in &before {
            if let Some(node) = state.nodes.get_mut(other) {
                node.behind.push(number);
            }
        }
        let waits = before.len();
        state.nodes.insert(number, Node { job: Some(job), ranges, waits, behind: Vec::new(), over: false });
        (number, waits == 0)
    }

    /// The same for a call that waits for nothing. `None`: something is in its way.
    pub(super) fn enter_if_free(&self, range: Range<u64>, writes: bool) -> Option<u64> {
        let mut state = self.state.lock();
        let mut meets = state.spans.range(..range.end).rev().take_while(|(_, span)| span.end > range.start);
        if meets.any(|(_, span)| span.writer.is_some() || writes) {
            return None;
        }
        let number = state.next;
        state.next += 1;
        state.take(&range, number, writes, &mut BTreeSet::new());
        let node = Node { job: None, ranges: vec![range], waits: 0, behind: Vec::new(), over: false };
        state.nodes.insert(number, node);
        Some(number)
    }

    /// A transfer is over. Those that may start now.
    pub(super) fn over(&self, number: u64) -> Vec<J> {
        let mut state = self.state.lock();
        let (mut free, mut going, mut gone) = (Vec::new(), Vec::new(), Vec::new());
        if let Some(node) = state.nodes.get_mut(&number) {
            node.over = true;
            going.extend((node.waits == 0).then_some(number));
        }
        while let Some(number) = going.pop() {
            let Some(node) = state.nodes.remove(&number) else { continue };
            node.ranges.iter().for_each(|range| state.leave(range, number));
            for behind in &node.behind {
                let Some(other) = state.nodes.get_mut(behind) else { continue };
                other.waits -= 1;
                match (other.waits, other.over) {
                    (0, true) => going.push(*behind),
                    (0, false) => free.extend(other.job.clone()),
                    _ => {}
                }
            }
            gone.push(node);
        }
        drop(state);
        // Behind the lock, since a transfer's memory goes with its handle.
        drop(gone);
        free
    }
}

impl<J> OrderState<J> {
    /// Cuts the span in which an address lies, so that one begins there.
    fn cut(&mut self, at: u64) {
        let Some((_, span)) = self.spans.range_mut(..at).next_back() else { return };
        if span.end > at {
            let behind = span.clone();
            span.end = at;
            self.spans.insert(at, behind);
        }
    }

    /// Enters a range, and adds what it comes after to `before`.
    fn take(&mut self, range: &Range<u64>, number: u64, writes: bool, before: &mut BTreeSet<u64>) {
        if range.is_empty() {
            return;
        }
        self.cut(range.start);
        self.cut(range.end);
        let known: Vec<(u64, u64)> =
            self.spans.range(range.clone()).map(|(start, span)| (*start, span.end)).collect();
        let mut at = range.start;
        for (start, end) in known.into_iter().chain([(range.end, range.end)]) {
            if at < start {
                let (writer, readers) =
                    if writes { (Some(number), BTreeSet::new()) } else { (None, BTreeSet::from([number])) };
                self.spans.insert(at, Span { end: start, writer, readers });
            }
            at = end;
            let Some(span) = self.spans.get_mut(&start).filter(|_| start < end) else { continue };
            // Also what a reader waits for: the reader may be over sooner.
            before.extend(span.writer);
            if writes {
                before.append(&mut span.readers);
                span.writer = Some(number);
            } else {
                span.readers.insert(number);
            }
        }
    }

    /// Takes a transfer out of the spans of one of its ranges.
    fn leave(&mut self, range: &Range<u64>, number: u64) {
        let mut empty = Vec::new();
        for (start, span) in self.spans.range_mut(range.clone()) {
            span.readers.remove(&number);
            span.writer = span.writer.filter(|writer| *writer != number);
            if span.writer.is_none() && span.readers.is_empty() {
                empty.push(*start);
            }
        }
        empty.into_iter().for_each(|start| _ = self.spans.remove(&start));
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[derive(Clone, Debug)]
    enum Op {
        Start(Vec<(u64, u64)>, bool),
        /// Starts one that waits for nothing, if nothing is in its way.
        StartIfFree((u64, u64), bool),
        /// Ends one of those that are under way: finished if it has started, else cancelled.
        End(prop::sample::Index),
    }

    fn op() -> impl Strategy<Value = Op> {
        let range = || (0_u64..60, 1_u64..20);
        let ranges = prop::collection::vec(range(), 1..4);
        prop_oneof![
            (ranges, any::<bool>()).prop_map(|(ranges, writes)| Op::Start(ranges, writes)),
            (range(), any::<bool>()).prop_map(|(range, writes)| Op::StartIfFree(range, writes)),
            any::<prop::sample::Index>().prop_map(Op::End),
        ]
    }

    struct Known {
        number: u64,
        ranges: Vec<(u64, u64)>,
        writes: bool,
        started: bool,
        over: bool,
    }

    fn meet(a: &Known, b: &Known) -> bool {
        let ranges =
            |one: &(u64, u64)| b.ranges.iter().any(|two| one.0 < two.0 + two.1 && two.0 < one.0 + one.1);
        (a.writes || b.writes) && a.ranges.iter().any(ranges)
    }

    proptest! {
        /// A transfer starts as soon as no earlier one that it meets is under way, and not before. (One that was
        /// cancelled while it waited holds up those behind it for as long as it would have waited.)
        #[test]
        fn transfers_that_meet_take_effect_in_order(ops in prop::collection::vec(op(), 1..60)) {
            let order = Order::new();
            let mut known: Vec<Known> = Vec::new();
            // Which are in the way of others: under way, or behind one that is.
            let mut blocks: Vec<bool> = Vec::new();
            for op in ops {
                match op {
                    Op::Start(ranges, writes) => {
                        let spans = ranges.iter().map(|(start, len)| *start..start + len).collect();
                        let (number, started) = order.enter(known.len(), spans, writes);
                        known.push(Known { number, ranges, writes, started, over: false });
                    }
                    Op::StartIfFree(range, writes) => {
                        let entered = order.enter_if_free(range.0..range.0 + range.1, writes);
                        let one = Known { number: 0, ranges: vec![range], writes, started: true, over: false };
                        let is_free = !known.iter().zip(&blocks).any(|(other, blocks)| *blocks && meet(other, &one));
                        prop_assert_eq!(entered.is_some(), is_free);
                        known.extend(entered.map(|number| Known { number, ..one }));
                    }
                    Op::End(index) => {
                        let alive: Vec<usize> = (0..known.len()).filter(|n| !known[*n].over).collect();
                        if alive.is_empty() {
                            continue;
                        }
                        let n = alive[index.index(alive.len())];
                        known[n].over = true;
                        for started in order.over(known[n].number) {
                            prop_assert!(!known[started].started && !known[started].over);
                            known[started].started = true;
                        }
                    }
                }
                blocks = vec![false; known.len()];
                for n in 0..known.len() {
                    let waits = (0..n).any(|before| blocks[before] && meet(&known[before], &known[n]));
                    blocks[n] = !known[n].over || (waits && !known[n].started);
                    if !known[n].over {
                        prop_assert_eq!(known[n].started, !waits, "{}", n);
                    }
                }
            }
            for left in known.iter().filter(|known| !known.over) {
                order.over(left.number);
            }
            let state = order.state.lock();
            prop_assert!(state.nodes.is_empty() && state.spans.is_empty(), "nothing is left");
        }
    }
}
