"""The words and sentence frames of all that kveval writes itself: the `noise` haystack, the needles and the questions.

The reference model's tokenizer takes its vocabulary from here: no word outside `vocabulary()` is ever generated.
Needle keys and the haystack share no word, so a key can only be read in its needle.
"""

from __future__ import annotations

import re
from functools import lru_cache


def _list(text: str) -> tuple[str, ...]:
    return tuple(text.split())


KEY_ADJECTIVES = _list(
    """
    amber ancient azure bashful bitter brass bronze cobalt copper cosmic crimson crystal curious daring dashing distant
    drowsy electric elegant emerald eternal fearless feathered fierce foggy frozen gallant gilded glowing golden granite
    hidden hollow humble icy indigo ivory jagged jolly lavender lively lonely lunar magnetic marble mellow midnight
    misty modest muddy mystic nimble noble opal patient pearl polished proud purple radiant restless royal rugged rustic
    sandy scarlet secret shiny silent silver sleepy smoky solar spotted stormy striped sturdy timid turquoise velvet
    violet wandering whispering wicked wild
    """
)
KEY_NOUNS = _list(
    """
    acorn anchor antelope arrow badger banjo beacon beaver bison buffalo bugle cactus camel candle canyon castle cello
    cheetah cobra comet compass condor coral cougar coyote crane cricket crown cypress dagger dolphin dragon drum eagle
    elephant ember falcon feather ferret flamingo flute fossil fox gazelle giraffe glacier goblet goose gorilla hammer
    harbor harp hawk hedgehog heron hornet hyena iguana island jackal jaguar javelin kettle lagoon lantern leopard lion
    lizard llama lobster magnet magpie mammoth maple meteor mirror moose needle octopus orchid ostrich otter owl oyster
    panther parrot peacock pelican penguin piano planet puma pyramid rabbit raccoon raven rhino rocket salmon scorpion
    seal serpent shark shield sparrow spider squirrel statue stork swan tiger torch tortoise trumpet tulip turtle
    unicorn volcano walrus whale willow wolf zebra
    """
)

# The needle and the question about it. The key stands within the last four tokens before the value, so that a model
# that matches short suffixes can tell one needle from another.
NEEDLE = " The access code of {key} is {value}."
QUESTION = "\n\nQuestion: What is the access code of {key}?\nAnswer: The access code of {key} is"

# Slots of the haystack frames below. An entry may be several words.
SLOTS: dict[str, tuple[str, ...]] = {
    "person": _list(
        """
        Adam Alice Anna Arthur Ben Carla Clara Daniel David Diana Edith Edward Ella Emma Felix Frank George Grace Hannah
        Harry Helen Henry Ida Jack James Jane Julia Karl Kate Laura Leo Lewis Lucy Martha Martin Mary Nina Nora Oliver
        Oscar Paul Peter Rose Ruth Sam Sarah Simon Sophie Thomas Tom
        """
    ),
    "worker": _list(
        """
        baker barber builder butcher captain carpenter cashier clerk cook dancer dentist designer doctor driver editor
        farmer fisherman gardener grocer guard guide inspector janitor judge lawyer librarian mayor mechanic merchant
        miller musician nurse painter pharmacist pilot plumber porter postman printer professor sailor secretary singer
        student surgeon tailor teacher waiter weaver writer
        """
    ),
    "thing": _list(
        """
        bag ball basket bell belt bench bicycle blanket book bottle bowl box bread brick broom brush bucket button cake
        camera card carpet chair cheese clock cloth coat cup curtain desk dish door dress engine envelope fence flag
        flour fork gate glass glove hat heater jacket jar key knife ladder lamp letter lid map mat medicine
        menu milk mug nail newspaper notebook oven package paint pan paper parcel pen pencil picture pillow pipe plate
        pot radio recipe ribbon ring roof rope rug sack saw scarf shelf shirt shoe sign soap sofa
        soup spade spoon stamp stone stool stove suitcase table tap tea tent ticket tile tool towel toy tray trunk
        umbrella vase wagon wallet watch wheel window wire wood
        """
    ),
    "place": _list(
        """
        airport attic bakery bank barn basement bathroom bedroom bridge cafe cellar church cinema classroom clinic
        college corner corridor cottage courthouse courtyard dock factory farm ferry field garage garden hall hospital
        hotel house kitchen laboratory library lobby market meadow mill museum office orchard palace park pharmacy
        playground pond port river road school shed shop square stable stadium station store street studio theatre tower
        town tunnel valley village warehouse workshop yard
        """
    ),
    "carried": _list(
        """
        borrowed bought brought carried checked cleaned collected counted covered delivered described dropped emptied
        filled fixed found hid lifted lost measured mended moved noticed opened ordered packed picked
        prepared pulled pushed repaired returned sent showed sold stored stole studied tested took touched
        turned used washed weighed wrapped
        """
    ),
    "went": _list("arrived came cycled drove hurried returned ran rode sailed travelled walked went"),
    "rested": _list("ate laughed listened read rested sang sat slept smiled stayed stood talked waited worked"),
    "quality": _list(
        """
        big blue bright broken brown cheap clean cold dark dirty dry empty expensive fresh full green grey heavy large
        light little long narrow new old orange pink plain red rough round sharp short simple small smooth soft square
        strong tall thick thin tiny useful warm wet white wide yellow young
        """
    ),
    "mood": _list(
        """
        afraid angry bored busy calm careful certain cheerful clever friendly glad grateful happy helpful honest hungry
        kind late lucky nervous polite quiet ready sad serious sick sorry strict surprised tired worried
        """
    ),
    "manner": _list(
        """
        again almost alone always badly carefully early easily gently gladly hardly hastily loudly neatly never often
        once partly politely quickly quietly rarely slowly sometimes soon together twice usually well
        """
    ),
    "time": _list(
        """
        morning afternoon evening night week month year spring summer autumn winter
        """
    ),
    "day": _list("Monday Tuesday Wednesday Thursday Friday Saturday Sunday"),
    "count": _list("two three four five six seven eight nine ten eleven twelve twenty thirty forty fifty"),
    "unit": _list("minutes hours days weeks months years"),
    "kin": _list("mother father sister brother aunt uncle cousin neighbour friend partner daughter son"),
    "subject": _list(
        """
        weather football history money politics music cooking traffic business law science travel art
        poetry fashion health farming fishing holidays exams prices repairs
        """
    ),
    "event": _list(
        """
        breakfast lunch dinner supper concert lesson meeting party wedding trial race match play sale storm funeral
        parade lecture
        """
    ),
}

# Frames of the haystack's sentences. Literal words carry punctuation; no frame needs "a" or "an" before a slot.
FRAMES = (
    "The {worker} {carried} the {quality} {thing} near the {place}.",
    "The {worker} {went} to the {place} every {day}.",
    "{person} {carried} the {thing} and {went} to the {place}.",
    "{person} {rested} in the {place} for {count} {unit}.",
    "{person} waited for {person} in the {place} until the {event} was over.",
    "In the {time}, the {worker} was {mood} about the {event}.",
    "In the {place} there were {count} boxes, and each one held some {quality} {thing}.",
    "After the {event}, {person} {carried} the {thing} for the {worker}.",
    "Before the {event} began, the {place} was {quality} and {quality}.",
    "When the {worker} {went} home, nobody in the {place} was {mood}.",
    "Nobody knew why the {thing} in the {place} was so {quality}.",
    "People in the {place} talked about {subject} and {subject} all {time}.",
    "It was hard work, but the {worker} did it {manner}.",
    "It took {count} {unit} to reach the {place} from the {place}.",
    "The {thing} was {quality}, so {person} {carried} another one.",
    "The {place} behind the {place} had {count} {quality} windows.",
    "Her {kin} was the {worker} who {carried} the {thing} last {day}.",
    "His {kin} {rested} {manner} while {person} {carried} the {quality} {thing}.",
    "{person} said that the {place} would be {quality} by {day}.",
    "{person} thought that {subject} was more useful than {subject}.",
    "{person} asked the {worker} about {subject}, but the answer was {manner} short.",
    "Every {time} the {worker} {carried} {count} letters for {person}.",
    "On the way to the {place}, they {carried} the {thing} {manner}.",
    "If the {event} is late, the {worker} will be {mood}.",
    "There was room for the {thing} under the {quality} roof of the {place}.",
    "At the {event}, her {kin} spoke {manner} about {subject}.",
    "Later that {time}, the {quality} {thing} was back in the {place}.",
    "Because the road was {quality}, {person} {went} {manner}.",
    "Then {person} wrote to the {worker} about the {thing}.",
    "Some of the {thing} was {quality}, and the rest was {quality}.",
    "They had been {mood} since the {event}, and so had the {worker}.",
    "We were told that the {worker} {went} past the {place} in the {time}.",
    "Most days {person} {rested} by the {quality} gate of the {place}.",
    "From the {place} you could see the {quality} roof of the {place}.",
    "With the {thing} in one hand, the {worker} {went} {manner} through the {place}.",
    "Not far from the {place}, {person} {carried} the {thing} that the {worker} lost.",
    "What {person} wanted was the {quality} {thing} and nothing else.",
    "As {mood} as ever, the {worker} {rested} beside the {quality} {thing}.",
)

# What is written besides words, digits, spaces and newlines.
PUNCTUATION = (",", ".", ":", "?")


def words(text: str) -> list[str]:
    """The words of ``text`` as written; slots, digits and punctuation are left out."""
    return re.findall(r"[A-Za-z]+", re.sub(r"\{\w+\}", " ", text))


@lru_cache(maxsize=1)
def haystack_words() -> tuple[str, ...]:
    """Every word of the `noise` haystack, sorted."""
    entries = [*FRAMES, *(entry for slot in SLOTS.values() for entry in slot)]
    return tuple(sorted({word for entry in entries for word in words(entry)}))


@lru_cache(maxsize=1)
def vocabulary() -> tuple[str, ...]:
    """Every word (case-sensitive, no spaces, no punctuation) of the generated haystack, needles and questions, sorted.

    Besides these words the texts hold digits and the characters of ``PUNCTUATION``, spaces and newlines.
    """
    own = {*haystack_words(), *KEY_ADJECTIVES, *KEY_NOUNS, *words(NEEDLE), *words(QUESTION)}
    return tuple(sorted(own))
